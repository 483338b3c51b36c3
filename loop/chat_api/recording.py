"""One recording: clients for an agent to ask, and the rows that become of what it asked."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ...store.errors import JobError, missing_extra
from ...store.records import Experience, Task
from ..inference.background import run_on
from ..inference.policy import Policy, PolicyError, Turn
from ..trajectories.trajectory import to_experiences
from .router import ROUTER, Route, application, server

if TYPE_CHECKING:
    from httpx2 import AsyncClient
    from openai import AsyncOpenAI, OpenAI

MODEL = "policy"
"""What the model is called; any other name does as well."""


@asynccontextmanager
async def record(
    policy: Policy,
    task: Task | None = None,
    *,
    heeds: Collection[str] = ("max_tokens", "stop"),
) -> AsyncIterator["Recording"]:
    """Let an agent ask a policy through OpenAI clients, and keep what it asked.

    As a workflow, which may return rows, a reward, or nothing, as any other:

    >>> async def my_workflow(task, policy):
    ...     async with record(policy, task) as session:
    ...         answer = await my_agent(session.client, task.prompt_text)
    ...     return float(answer == task.answer)

    Tokens are sampled as the run says, whatever the agent asks for: an agent that asks for
    temperature 0 would be the same in all tries. `heeds` names what of Sampling is as it asks.

    An agent that fails because the policy did fails with the policy's own error.
    """
    recording = Recording(policy, task, heeds)
    try:
        yield recording
    except PolicyError:
        raise
    except Exception as error:
        if recording.failure is not None:
            raise recording.failure from error
        raise
    finally:
        await recording.close()


class Recording:
    """An agent's run; made by `record`, and open until its block ends."""

    model = MODEL

    def __init__(self, policy: Policy, task: Task | None, heeds: Collection[str]) -> None:
        self.session_id = uuid4().hex
        """Names the session, in its addresses and in the column of rows."""
        self.task = task
        self._route = ROUTER.routes[self.session_id] = Route(policy, heeds)

    @property
    def turns(self) -> list[Turn]:
        """What was asked and answered so far."""
        return self._route.turns

    @property
    def failure(self) -> PolicyError | None:
        """Why the last request got no answer; None when it got one."""
        return self._route.failure

    @cached_property
    def client(self) -> "AsyncOpenAI":
        """A client of the package `openai`, which asks in this process, without a network."""
        return _openai().AsyncOpenAI(
            base_url=f"http://localhost/sessions/{self.session_id}/v1",
            api_key="none",
            http_client=self.http_client,
            max_retries=0,
        )

    @cached_property
    def http_client(self) -> "AsyncClient":
        """What `client` speaks through, for frameworks that make their own."""
        _openai()
        import httpx2

        return httpx2.AsyncClient(transport=httpx2.ASGITransport(application()))

    @cached_property
    def sync_client(self) -> "OpenAI":
        """A client that blocks, over HTTP on loopback; for agents that run in another thread."""
        return _openai().OpenAI(base_url=self.base_url, api_key=self.api_key, max_retries=0)

    @property
    def base_url(self) -> str:
        """The address, on loopback, for agents that ask for one, in this process or another.

        The first that asks for it starts the server. The event loop must be free to answer.
        """
        self._route.is_remote = True
        return f"{server().address}/sessions/{self.session_id}/v1"

    @property
    def api_key(self) -> str:
        """The key for `base_url`; only who has it is answered."""
        return server().token

    def rows(self, *, reward: float | None = None, **columns: Any) -> list[Experience]:
        """Return the rows that the turns so far are; with several, each has the reward.

        Turns whose tokens continue each other are one row. Without a task, its task is what was
        asked first. Raises JobError when nothing was asked.
        """
        if not self.turns:
            raise JobError(
                "the agent asked nothing of the policy; does it use the session's client?"
            )
        task = self.task or Task(messages=self.turns[0].messages)
        given = {"session_id": self.session_id, "reward": reward, **columns}
        return [replace(row, **given) for row in to_experiences(task, self.turns)]

    async def close(self) -> None:
        """End the session: nothing is answered any more."""
        ROUTER.routes.pop(self.session_id, None)
        if "http_client" in self.__dict__:
            await self.http_client.aclose()
            await application().end(self.session_id)
        if "sync_client" in self.__dict__:
            self.sync_client.close()
        if self._route.is_remote:
            await run_on(server().app.end(self.session_id))


def _openai() -> Any:
    try:
        import openai
    except ModuleNotFoundError as error:
        raise missing_extra("openai", "agents") from error
    return openai

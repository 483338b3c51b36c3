"""Recordings: OpenAI clients for an agent, and the rows of its requests."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ...store.errors import JobError, missing_extra
from ...store.records import Experience, Task
from ..inference.event_loop import run_on
from ..inference.policy import Policy, PolicyError, Turn
from ..trajectories.trajectory import to_experiences
from .router import ROUTER, Route, application, server

if TYPE_CHECKING:
    from httpx2 import AsyncClient
    from openai import AsyncOpenAI, OpenAI

MODEL = "policy"
"""The name of the model; any other name works as well."""


@asynccontextmanager
async def record(
    policy: Policy, task: Task | None = None, *, heeds: Collection[str] = ("max_tokens", "stop")
) -> AsyncIterator["Recording"]:
    """Record an agent's requests to a policy, which it makes through OpenAI clients.

    In a workflow, which may return rows, a reward, or nothing:

    >>> async def my_workflow(task, policy):
    ...     async with record(policy, task) as session:
    ...         answer = await my_agent(session.client, task.prompt_text)
    ...     return float(answer == task.answer)

    Tokens are sampled with the run's settings, not the agent's: an agent that asks for temperature
    0 would give the same answer in all rollouts. `heeds` names the fields of Sampling that the
    agent may set.

    If the agent fails because the policy failed, the policy's own error is raised.
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
    """The recording of an agent; made by `record`, and open until its block ends."""

    model = MODEL

    def __init__(self, policy: Policy, task: Task | None, heeds: Collection[str]) -> None:
        self.session_id = uuid4().hex
        """The name of the session in its URLs and in the column of the rows."""
        self.task = task
        self._route = ROUTER.routes[self.session_id] = Route(policy, heeds)

    @property
    def turns(self) -> list[Turn]:
        """The turns so far."""
        return self._route.turns

    @property
    def failure(self) -> PolicyError | None:
        """The error of the last request, or None."""
        return self._route.failure

    @cached_property
    def client(self) -> "AsyncOpenAI":
        """An async client of the package `openai` that stays in this process, without a network."""
        return _openai().AsyncOpenAI(
            base_url=f"http://localhost/sessions/{self.session_id}/v1",
            api_key="none",
            http_client=self.http_client,
            max_retries=0,
        )

    @cached_property
    def http_client(self) -> "AsyncClient":
        """The HTTP client of `client`, for frameworks that make their own OpenAI client."""
        _openai()
        import httpx2

        return httpx2.AsyncClient(transport=httpx2.ASGITransport(application()))

    @cached_property
    def sync_client(self) -> "OpenAI":
        """A blocking client, over HTTP on loopback; for agents that run in another thread."""
        return _openai().OpenAI(base_url=self.base_url, api_key=self.api_key, max_retries=0)

    @property
    def base_url(self) -> str:
        """The URL on loopback, for agents in this process or another.

        The first access starts the server. The event loop must be free to answer.
        """
        self._route.is_remote = True
        return f"{server().address}/sessions/{self.session_id}/v1"

    @property
    def api_key(self) -> str:
        """The key that `base_url` requires."""
        return server().token

    def rows(self, *, reward: float | None = None, **columns: Any) -> list[Experience]:
        """Return the turns so far as rows; if there are several, each has the reward.

        Turns whose tokens continue each other share a row. Without a task, the first prompt is the
        task. Raises JobError if the agent made no request.
        """
        if not self.turns:
            raise JobError(
                "the agent asked nothing of the policy; does it use the session's client?"
            )
        task = self.task or Task(messages=self.turns[0].messages)
        given = {"session_id": self.session_id, "reward": reward, **columns}
        return [replace(row, **given) for row in to_experiences(task, self.turns)]

    async def close(self) -> None:
        """End the session; later requests are refused."""
        # First, so that a request that arrives during the awaits below is refused.
        ROUTER.routes.pop(self.session_id, None)
        # `__dict__` has a cached property only if it was used; access would create the client.
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
        raise missing_extra("openai", "serve") from error
    return openai

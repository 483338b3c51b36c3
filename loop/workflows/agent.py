"""An agent that somebody wrote already, as a workflow: it asks the policy by OpenAI clients."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from types import ModuleType
from typing import Annotated, Any

from pydantic import AfterValidator

from ...store.errors import ConfigError, nearest
from ...store.records import Experience, Task
from ..chat_api.recording import Recording, record
from ..config.resolve import function as resolved
from ..inference.policy import Policy

_GIVEN = ("client", "http_client", "base_url", "api_key", "model", "prompt", "messages", "task")


def _known(name: str) -> str:
    """Check, before any work, that there is such an agent, and that it can be called."""
    _check(name, resolved(name, ModuleType("none"), "agent"))
    return name


def _check(name: str, run: Callable[..., Any]) -> None:
    taken = inspect.signature(run).parameters
    if not {"client", "http_client", "base_url"} & set(taken):
        raise ConfigError(
            f"the agent `{name}` takes neither `client` nor `base_url`, so it cannot ask the "
            f"policy; it is given by name what it takes of {', '.join(_GIVEN)}"
        )


async def agent(
    task: Task,
    policy: Policy,
    *,
    function: Annotated[str, AfterValidator(_known)],
    arguments: dict[str, Any] | None = None,
    heeds: list[str] | None = None,
) -> list[Experience]:
    """Let an agent try a task; what it asks of the policy is trained on.

    `function` is `package.module:function`, async or not. By name it is given what it takes of:
    `client` (of the package openai; one that blocks when it is not async), `http_client`,
    `base_url` and `api_key` (to make a client of its own), `model`, `prompt` (the last user
    message), `messages`, `task`; and of `arguments`, whatever is there.

    It may return its answer, which the run's rewards then judge; or its reward, a number or named
    parts; or nothing: then the last answer of the policy is judged. `heeds` names what of sampling
    is as the agent asks: max_tokens and stop, if nothing is said.
    """
    run = resolved(function, ModuleType("none"), "agent")
    given = {} if heeds is None else {"heeds": heeds}
    async with record(policy, task, **given) as session:
        chosen = _arguments(function, run, task, session, arguments or {})
        if inspect.iscoroutinefunction(run):
            summary = await run(**chosen)
        else:
            summary = await _in_thread(lambda: run(**chosen))
            summary = await summary if inspect.isawaitable(summary) else summary
        return _answered(session.rows(), summary)


async def _in_thread(run: Callable[[], Any]) -> Any:
    """Call what blocks in a thread of its own.

    One that hangs takes none of the loop's threads away, and the process ends without it.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = copy_context()

    def settle(told: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(told)
        elif isinstance(error, StopIteration):  # which no future takes
            done.set_exception(RuntimeError(f"the agent raised {error!r}"))
        else:
            done.set_exception(error)

    def work() -> None:
        told, failure = None, None
        try:
            told = context.run(run)
        except BaseException as error:  # noqa: BLE001 - who awaits it gets it
            failure = error
        with suppress(RuntimeError):  # the loop ended, and nobody awaits it any more
            loop.call_soon_threadsafe(settle, told, failure)

    threading.Thread(target=work, name="rlake-agent", daemon=True).start()
    return await done


def _arguments(
    name: str, run: Callable[..., Any], task: Task, session: Recording, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what an agent takes of what there is."""
    is_async = inspect.iscoroutinefunction(run)
    made: dict[str, Callable[[], Any]] = {
        "client": lambda: session.client if is_async else session.sync_client,
        "http_client": lambda: session.http_client,
        "base_url": lambda: session.base_url,
        "api_key": lambda: session.api_key,
        "model": lambda: session.model,
        "prompt": lambda: task.prompt_text or "",
        "messages": lambda: [dict(message) for message in task.messages],
        "task": lambda: task,
    }
    made |= {key: lambda value=value: value for key, value in arguments.items()}
    taken = inspect.signature(run).parameters
    if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return {key: made[key]() for key in made if key in taken or key in arguments}
    for key in arguments:
        if key not in taken:
            raise ConfigError(f"the agent `{name}` has no parameter `{key}`{nearest(key, taken)}")
    missing = [n for n, p in taken.items() if n not in made and p.default is p.empty]
    if missing:
        raise ConfigError(
            f"the agent `{name}` needs `{missing[0]}`, and nobody gives it; name it in `arguments`"
        )
    return {key: made[key]() for key in taken if key in made}


def _answered(rows: list[Experience], told: Any) -> list[Experience]:
    """Write on each row what the agent returned, since they share one reward."""
    if told is None:
        last = rows[-1].response_text
        return [replace(row, response_text=last) for row in rows]
    if isinstance(told, Mapping):
        return [row.with_reward(dict(told)) for row in rows]
    if isinstance(told, int | float):
        return [row.with_reward({"reward": float(told)}) for row in rows]
    return [replace(row, response_text=str(told)) for row in rows]

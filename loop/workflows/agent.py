"""Run an existing agent as a workflow: it calls the policy through OpenAI clients."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator

from ...operators.import_path import find_function
from ...store.errors import ConfigError, nearest
from ...store.records import Experience, Task
from ..chat_api.recording import Recording, record
from ..inference.policy import Policy
from ..trajectories.user_code import call_in_thread

_GIVEN = ("client", "http_client", "base_url", "api_key", "model", "prompt", "messages", "task")


def _known(name: str) -> str:
    """Check, before any work, that the agent exists and can call the policy."""
    taken = inspect.signature(find_function(name, None, "agent")).parameters
    if not {"client", "http_client", "base_url"} & set(taken):
        raise ConfigError(
            f"the agent `{name}` takes neither `client` nor `base_url`, so it cannot call the "
            f"policy; declare one of its parameters as one of {', '.join(_GIVEN)}"
        )
    return name


async def agent(
    task: Task,
    policy: Policy,
    *,
    function: Annotated[str, AfterValidator(_known)],
    arguments: dict[str, Any] | None = None,
    heeds: list[str] | None = None,
) -> list[Experience]:
    """Run an agent on a task; its requests to the policy are trained on.

    `function` is `package.module:function`, async or not. It receives, by name, the parameters that
    it declares out of `client` (of the package openai; a blocking one if the function is not
    async), `http_client`, `base_url` and `api_key` (to make its own client), `model`, `prompt` (the
    last user message), `messages`, `task`, and the keys of `arguments`.

    It may return its answer, which the run's rewards then judge; its reward, as a number or as
    named parts; or nothing, and the last answer of the policy is judged. `heeds` names the sampling
    settings that the agent may choose (default: max_tokens and stop).
    """
    run = find_function(function, None, "agent")
    given = {} if heeds is None else {"heeds": heeds}
    async with record(policy, task, **given) as session:
        chosen = _arguments(function, run, task, session, arguments or {})
        if inspect.iscoroutinefunction(run):
            returned = await run(**chosen)
        else:
            returned = await call_in_thread(lambda: run(**chosen), "rlake-agent")
        return answered(session.rows(), returned)


def _arguments(
    name: str, run: Callable[..., Any], task: Task, session: Recording, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    is_async = inspect.iscoroutinefunction(run)
    # Made on demand: `client` needs the package openai, and `base_url` starts a server.
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
            f"the agent `{name}` needs `{missing[0]}`, which is not given; set it in `arguments`"
        )
    return {key: made[key]() for key in taken if key in made}


def answered(rows: list[Experience], returned: Any) -> list[Experience]:
    """Add what the agent returned to each row, since the rows share one reward."""
    if returned is None:
        last = rows[-1].response_text
        return [replace(row, response_text=last) for row in rows]
    if isinstance(returned, Mapping):
        return [row.with_reward(dict(returned)) for row in rows]
    if isinstance(returned, int | float):
        return [row.with_reward({"reward": float(returned)}) for row in rows]
    return [replace(row, response_text=str(returned)) for row in rows]

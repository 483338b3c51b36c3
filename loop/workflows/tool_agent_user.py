"""An agent serves a user with tools over a database, under rules, as in tau-bench.

The reward is that of tau-bench (arXiv:2406.12045, and its successor arXiv:2506.07982, whose users
have tools too): whether the database is in the end as the right calls would leave it, and the user
has heard what they must.
"""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Protocol

from ...operators.import_path import find_function, taken_apart
from ...store.errors import ConfigError, JobError, nearest
from ...store.records import Message, Task
from ..environments.tools import Tool, Toolbox, tool
from ..inference.policy import Policy
from ..trajectories.conversation import Conversation
from ..trajectories.trajectory import record_metric
from .react import results
from .user_simulator import ROLE, SimulatedUser, user_of

DomainSpec = str | Mapping[str, Mapping[str, Any] | None]
"""`package.module:function`, or `{package.module:function: {parameter: value}}`."""


_TOOLS = {"assistant": "tools", "user": "user_tools"}
"""Who may request the call of a tool, and the part of a domain that has theirs."""


class Domain(Protocol):
    """A database with tools over it, and the rules for their use; each rollout makes its own.

    It may also have `user_tools`, functions that only the user may call, on the same database, and
    `begin(task)`, which brings the database into the state that a task begins with.
    """

    rules: str
    """The agent's system message."""
    database: Any
    """Of what JSON can hold; the tools change it."""

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:
        """Functions that the agent may call (`environments.tools.tool`)."""
        ...


async def tool_agent_user(
    task: Task,
    policy: Policy,
    *,
    domain: DomainSpec,
    user: Policy | None = None,
    max_turns: int = 24,
    tool_seconds: float = 30.0,
    done: str = "[DONE]",
    role: str = ROLE,
) -> dict[str, float]:
    """Let the policy converse with a user and call tools, for at most `max_turns` answers.

    `domain` names a class or function that makes a `Domain`. `user` is a model of
    `explorer.auxiliary_models` that plays the user, as in `user_simulator`, and ends the
    conversation with `done`; it sees neither calls nor their results, except those of its own
    tools, which the policy does not see and which are counted as `user/calls`, `user/errors` and
    so on. Without one, the task's message is all that the user says, and the first answer without a
    call ends the conversation.

    The task's metadata have `actions`, the right calls as `{"name": ..., "arguments": {...}}`, with
    `"requestor": "user"` where they are the user's; `outputs`, texts that the user must hear; and,
    for a simulated user, `goal` and `persona`. The reward is 1 if the database is as those calls
    leave it and all outputs were said, else 0. The metrics `goal/database`, `goal/said` and
    `user/done` tell which. Raises JobError if the actions of a task cannot be carried out, and
    PolicyError if the user model fails.
    """
    about = task.metadata or {}
    outputs = _listed(task, about, "outputs", str)
    actions = _listed(task, about, "actions", Mapping)
    # two of their own: neither the other rollouts nor the right calls change this one's
    world, right = _made(domain, task), _made(domain, task)
    theirs = list(_tools(world, "user").values())
    if user is None and theirs:
        raise ConfigError(
            f"the users of the domain `{taken_apart(domain, 'a domain')[0]}` have tools; name the "
            "model that plays them in `explorer.auxiliary_models.user`"
        )
    # in a thread: the tools of a domain may block
    await asyncio.to_thread(_carry_out, right, actions, task)
    note = partial(record_metric, policy)
    box = Toolbox(world.tools, seconds=tool_seconds, note=note)
    own = [message for message in task.messages if message.get("role") == "system"]
    system: list[Message] = own or [{"role": "system", "content": world.rules}]
    rest = [message for message in task.messages if message.get("role") != "system"]
    conversation = Conversation(task, policy, tools=box.specs, messages=[*system, *rest])
    person = None
    if user is not None:
        model = user_of(policy, user)
        person = SimulatedUser(
            task, model, role=role, done=done, tools=theirs, seconds=tool_seconds, note=note
        )
    is_done = False
    # one more round than answers, in which the user may end the conversation
    for turn in range(max_turns + 1):
        spoken = conversation.messages[len(system) :]
        if not spoken or _is_reply(spoken[-1]):
            text = "" if person is None else await person.reply(spoken)
            is_done = person is None or person.is_done
            if is_done:
                break
            conversation.add(text)
        if turn == max_turns:
            conversation.finish("max_turns")
            break
        if not await conversation.try_respond():
            break
        calls = conversation.messages[-1].get("tool_calls") or []
        conversation.messages += [called.message async for called in results(box, calls)]
    # also after a cut conversation: what the agent did by then counts
    same = _as_json(world.database) == _as_json(right.database)
    said = _said(conversation.messages, outputs)
    note("goal/database", float(same))
    note("goal/said", float(said))
    note("user/done", float(is_done))
    return {"goal": float(same and said)}


def _tools(world: Domain, requestor: str) -> dict[str, Tool]:
    return {one.name: one for one in map(tool, getattr(world, _TOOLS[requestor], ()))}


def _made(spec: DomainSpec, task: Task) -> Domain:
    name, given = taken_apart(spec, "a domain")
    made = find_function(name, None, "domain")(**given)
    if hasattr(made, "begin"):
        # a copy: what it takes from the task into the database must not be another rollout's
        made.begin(deepcopy(task))
    missing = [part for part in ("rules", "database", "tools") if not hasattr(made, part)]
    if missing:
        raise ConfigError(
            f"the domain `{name}` has no `{missing[0]}`; expected an object with `rules`, "
            "`database` and `tools`"
        )
    return made


def _carry_out(world: Domain, actions: Sequence[Mapping[str, Any]], task: Task) -> None:
    known = {who: _tools(world, who) for who in _TOOLS}
    for action in actions:
        name, arguments = str(action.get("name")), action.get("arguments") or {}
        who = action.get("requestor") or "assistant"
        if who not in known:
            raise JobError(
                f"`requestor` of an action of task {task.task_id} must be `assistant` or `user`, "
                f"got {who!r}"
            )
        tools = known[who]
        if name not in tools:
            whose = "" if who == "assistant" else " of the user"
            raise JobError(
                f"task {task.task_id} calls `{name}`, no tool{whose}{nearest(name, tools)}"
            )
        try:
            if isinstance(arguments, str):  # JSON, as in the calls of OpenAI's API
                arguments = json.loads(arguments)
            returned = tools[name](**tools[name].taken(dict(arguments)))
            if inspect.isawaitable(returned):
                asyncio.run(_awaited(returned))
        except Exception as error:
            raise JobError(
                f"`{name}` of the actions of task {task.task_id} fails: "
                f"{type(error).__name__}: {error}"
            ) from error


async def _awaited(returned: Awaitable[Any]) -> None:
    await returned


def _listed(task: Task, about: Mapping[str, Any], name: str, kind: type) -> Sequence[Any]:
    given = about.get(name) or ()
    if isinstance(given, str | Mapping) or not all(isinstance(one, kind) for one in given):
        of = "texts" if kind is str else "calls, each with a `name` and `arguments`"
        raise JobError(f"`{name}` of task {task.task_id} must be a list of {of}, got {given!r}")
    return given


def _is_reply(message: Message) -> bool:
    return message.get("role") == "assistant" and not message.get("tool_calls")


def _said(messages: Sequence[Message], outputs: Sequence[str]) -> bool:
    replies = [str(m.get("content") or "") for m in messages if _is_reply(m)]
    # as in tau-bench: 1,200 and 1200 are the same number
    plain = "\n".join(replies).lower().replace(",", "")
    return all(str(output).lower().replace(",", "") in plain for output in outputs)


def _as_json(database: Any) -> str:
    # the order in which rows were added to a mapping does not belong to its state
    return json.dumps(database, sort_keys=True, default=str)

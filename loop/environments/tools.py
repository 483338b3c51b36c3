"""Tools: Python functions with JSON schemas, and what happens when a policy calls them."""

import asyncio
import inspect
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from ...operators.concurrency import places
from ...operators.import_path import import_from
from ...store.errors import ConfigError, JobError, RlakeError, nearest
from ...store.records import Message, proper

THREADS_AT_ONCE = 64
"""Calls of functions that are not `async` under way at once; more wait."""
MOST_THREADS = 256
"""Such calls that may go on though nobody waits for them; then no further one is begun."""
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters):\s*$", re.MULTILINE)
_PARAMETER = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.+)$", re.MULTILINE)


class Unfit(ValueError):
    """Arguments that do not fit a tool's schema."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """What a policy may call: a name, what it does, its parameters, and the function."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments, an object."""
    function: Callable[..., Any]
    """Called with the arguments by name; `async` or not."""
    taken: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    """Makes the function's arguments of the call's; raises Unfit where they do not fit."""

    @property
    def spec(self) -> dict[str, Any]:
        """The tool as chat templates and chat APIs are told of it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, as if it were no tool."""
        return self.function(*args, **kwargs)


def tool(function: Callable[..., Any]) -> Tool:
    """Make a tool of a function: its schema is its signature, its docstring says what it does.

    Lines `name: what it is` below `Args:` describe parameters, as does `Annotated[int,
    pydantic.Field(description=...)]`. Arguments are read as pydantic reads JSON: `"3"` fits an int.

    >>> @tool
    ... def add(a: int, b: int = 1) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> add.spec["function"]["parameters"]["required"], add(2)
    (['a'], 3)

    Raises ConfigError for a function whose parameters cannot be given as JSON.
    """
    if isinstance(function, Tool):
        return function
    name = getattr(function, "__name__", type(function).__name__)

    @wraps(function)
    def taken(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(cast(Any, taken))
        schema = adapter.json_schema()
    except Exception as error:  # pydantic says in many kinds what it cannot read
        raise ConfigError(
            f"`{name}` cannot be a tool: {str(error).splitlines()[0]}; annotate its parameters "
            "with types that JSON has"
        ) from error
    if schema.get("type") != "object" and schema.get("properties") is None:
        raise ConfigError(f"`{name}` cannot be a tool: parameters without names cannot be called")
    message, described = _described(inspect.getdoc(function) or "")
    return Tool(
        name=name,
        description=message or name,
        parameters=_plain(schema, described),
        function=function,
        taken=lambda given: _taken(adapter, given),
    )


def _taken(adapter: TypeAdapter[Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return adapter.validate_python(ArgsKwargs((), dict(given)))[1]
    except ValidationError as error:
        message = [f"`{'.'.join(map(str, e['loc']))}`: {e['msg']}" for e in error.errors()[:4]]
        raise Unfit("; ".join(message)) from error


def _described(text: str) -> tuple[str, dict[str, str]]:
    """Return what a docstring says of a function, and of its parameters."""
    parts = _SECTION.split(text, maxsplit=1)
    return parts[0].strip(), dict(_PARAMETER.findall(parts[2])) if len(parts) > 2 else {}


def _plain(schema: Mapping[str, Any], described: Mapping[str, str]) -> dict[str, Any]:
    """Leave out the titles that pydantic makes, and add what the docstring says."""
    properties = {}
    for name, one in (schema.get("properties") or {}).items():
        kept = {k: v for k, v in one.items() if k != "title"}
        properties[name] = {"description": described[name], **kept} if name in described else kept
    rest = {k: v for k, v in schema.items() if k not in ("title", "additionalProperties")}
    return {**rest, "type": "object", "properties": properties}


@dataclass(frozen=True, kw_only=True)
class Called:
    """What became of one call."""

    message: Message
    """What the policy is told: as a tool, or as the user where the call could not be read."""
    failure: str | None = None
    """unknown_tool, malformed_arguments or tool_error; None: it went well."""


class Toolbox:
    """Tools by name, which are called as a policy asks.

    Whatever goes wrong becomes a message to the policy that begins with `Error:`, and a number
    that is noted: `tools/calls`, `tools/unknown`, `tools/malformed` (no JSON), `tools/unfit` (JSON
    that is no argument of it), `tools/errors` (it raised), `tools/timeouts`, `tools/truncated`,
    `tools/refused` (too many).
    """

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any] | str],
        *,
        seconds: float = 30.0,
        longest: int = 8000,
        note: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Take functions, tools, or names `package.module:function`.

        A call may take `seconds`; of a result the first `longest` characters are shown. Raises
        ConfigError for a name that is not found, or is there twice.
        """
        found = [_named(one) if isinstance(one, str) else tool(one) for one in tools]
        self._tools = {one.name: one for one in found}
        if len(self._tools) != len(found):
            names = [one.name for one in found]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"there are two tools `{twice}`; rename one of them")
        self._seconds, self._longest, self._note = seconds, longest, note

    @property
    def specs(self) -> list[dict[str, Any]]:
        """The tools as policies are told of them."""
        return [one.spec for one in self._tools.values()]

    async def call(self, call: Mapping[str, Any]) -> Called:
        """Answer one of the `tool_calls` of an assistant message; never raises."""
        self._note("tools/calls")
        function = call["function"]
        name, arguments = function["name"], function["arguments"]
        if not name:
            self._note("tools/malformed")
            said = f"Error: this is no call of a tool: {arguments[:200]}"
            return Called(message={"role": "user", "content": said}, failure="malformed_arguments")
        text, failure = await self._result(name, arguments)
        if len(text) > self._longest:
            self._note("tools/truncated")
            cut = f"\n[cut: these are the first {self._longest} of {len(text)} characters]"
            text = text[: self._longest] + cut
        message = {"role": "tool", "name": name, "content": proper(text)}
        if call.get("id"):
            message["tool_call_id"] = call["id"]
        return Called(message=message, failure=failure)

    def refused(self, call: Mapping[str, Any], *, most: int) -> Called:
        """Answer a call that is one too many; it fails, and nothing is called."""
        self._note("tools/refused")
        summary = f"Error: an answer may make {most} calls"
        name, number = call["function"]["name"], call.get("id")
        message = {"role": "tool", "name": name, "content": summary, "tool_call_id": number}
        return Called(message=message, failure="tool_error")

    async def _result(self, name: str, arguments: str) -> tuple[str, str | None]:
        found = self._tools.get(name)
        if found is None:
            self._note("tools/unknown")
            message = f"Error: there is no tool `{name}`{nearest(name, self._tools)}"
            return message, "unknown_tool"
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            self._note("tools/malformed")
            return f"Error: the arguments are no JSON: {error}", "malformed_arguments"
        try:
            if not isinstance(given, dict):
                raise Unfit(f"expected an object, got {type(given).__name__}")
            taken = found.taken(given)
        except Unfit as error:
            self._note("tools/unfit")
            return f"Error: the arguments do not fit `{name}`: {error}", "malformed_arguments"
        return await self._outcome(found, taken)

    async def _outcome(self, found: Tool, taken: Mapping[str, Any]) -> tuple[str, str | None]:
        limit = asyncio.timeout(self._seconds)
        try:
            if inspect.iscoroutinefunction(found.function):
                async with limit:
                    return _as_text(await found.function(**taken)), None
            async with places("tools", THREADS_AT_ONCE), limit:
                return _as_text(await _in_thread(found.function, taken)), None
        except Exception as error:  # noqa: BLE001 - the boundary to users' code: the policy is told
            if limit.expired():
                self._note("tools/timeouts")
                return f"Error: `{found.name}` took longer than {self._seconds:g} s", "tool_error"
            self._note("tools/errors")
            kind = "" if isinstance(error, RlakeError) else f"{type(error).__name__}: "
            return f"Error: {kind}{str(error)[:1000]}", "tool_error"


def _named(name: str) -> Tool:
    found = import_from(name, "tool")
    if not callable(found):
        raise ConfigError(f"the tool `{name}` must be a function, got {type(found).__name__}")
    return tool(found)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


_threads = threading.BoundedSemaphore(MOST_THREADS)


async def _in_thread(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a function in a thread of its own, which a process that ends does not wait for."""
    if not _threads.acquire(blocking=False):
        raise JobError(f"{MOST_THREADS} calls of tools go on without an end")
    done: Future[Any] = Future()
    context = copy_context()

    def work() -> None:
        try:
            result = context.run(function, **given)
        except BaseException as error:  # noqa: BLE001 - whoever waits for it is told
            _threads.release()
            if done.set_running_or_notify_cancel():
                # what ends a thread or a generator must not end the loop that waits for it
                fine = isinstance(error, Exception) and not isinstance(error, StopIteration)
                done.set_exception(error if fine else JobError(f"{type(error).__name__}: {error}"))
        else:
            _threads.release()
            if done.set_running_or_notify_cancel():
                done.set_result(result)

    threading.Thread(target=work, name="rlake-tool", daemon=True).start()
    result = await asyncio.wrap_future(done)
    return await result if inspect.isawaitable(result) else result

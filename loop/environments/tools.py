"""Tools: Python functions with JSON schemas that a policy can call."""

import asyncio
import inspect
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from ...operators.concurrency import shared_semaphore
from ...operators.import_path import find_function
from ...store.errors import ConfigError, JobError, RlakeError, nearest
from ...store.records import Message, proper
from ..trajectories.user_code import call_in_thread

THREADS_AT_ONCE = 64
"""Most concurrent calls of functions that are not `async`; further ones wait."""
MOST_THREADS = 256
"""Most running calls of such functions, including those that timed out; then calls fail."""
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters):\s*$", re.MULTILINE)
_PARAMETER = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.+)$", re.MULTILINE)


class Unfit(ValueError):
    """Raised for arguments that do not fit a tool's schema."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that a policy may call, with its name, description and parameters."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments, an object."""
    function: Callable[..., Any]
    """Called with the arguments by name; `async` or not."""
    taken: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    """Converts the arguments of a call to those of the function; raises Unfit."""

    @property
    def spec(self) -> dict[str, Any]:
        """The tool as chat templates and chat APIs describe it."""
        function = {"name": self.name, "description": self.description}
        return {"type": "function", "function": function | {"parameters": dict(self.parameters)}}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function directly."""
        return self.function(*args, **kwargs)


def tool(function: Callable[..., Any]) -> Tool:
    """Make a tool of a function, with the schema of its signature and its docstring.

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
    except Exception as error:  # pydantic raises many types for what it cannot read
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
    parts = _SECTION.split(text, maxsplit=1)
    return parts[0].strip(), dict(_PARAMETER.findall(parts[2])) if len(parts) > 2 else {}


def _plain(schema: Mapping[str, Any], described: Mapping[str, str]) -> dict[str, Any]:
    """Remove the titles that pydantic adds, and add descriptions from the docstring."""
    properties = {}
    for name, one in (schema.get("properties") or {}).items():
        kept = {k: v for k, v in one.items() if k != "title"}
        properties[name] = {"description": described[name], **kept} if name in described else kept
    rest = {k: v for k, v in schema.items() if k not in ("title", "additionalProperties")}
    return {**rest, "type": "object", "properties": properties}


@dataclass(frozen=True, kw_only=True)
class Called:
    """The result of one call."""

    message: Message
    """What the policy sees: a tool message, or a user message if the call was unreadable."""
    failure: str | None = None
    """unknown_tool, malformed_arguments or tool_error; None for success."""


class Toolbox:
    """Tools by name, which are called on behalf of a policy.

    Any error becomes a message to the policy that begins with `Error:`. The metrics are
    `tools/calls`, `tools/unknown`, `tools/malformed` (not JSON), `tools/unfit` (JSON that does not
    fit the schema), `tools/errors` (the function raised), `tools/timeouts`, `tools/truncated` and
    `tools/refused` (too many calls).
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

        A call may take `seconds`; the first `longest` characters of a result are shown. Raises
        ConfigError for an unknown or duplicate name.
        """
        found = [
            tool(find_function(one, None, "tool") if isinstance(one, str) else one) for one in tools
        ]
        self._tools = {one.name: one for one in found}
        if len(self._tools) != len(found):
            names = [one.name for one in found]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"there are two tools `{twice}`; rename one of them")
        self._seconds, self._longest, self._note = seconds, longest, note

    @property
    def specs(self) -> list[dict[str, Any]]:
        """The tools as policies see them."""
        return [one.spec for one in self._tools.values()]

    async def call(self, call: Mapping[str, Any]) -> Called:
        """Answer one of the `tool_calls` of an assistant message; never raises."""
        self._note("tools/calls")
        function = call["function"]
        name, arguments = function["name"], function["arguments"]
        if not name:
            self._note("tools/malformed")
            said = f"Error: this is not a call of a tool: {arguments[:200]}"
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
        """Refuse a call beyond the limit, without calling anything."""
        self._note("tools/refused")
        summary = f"Error: an answer may make {most} calls"
        name, number = call["function"]["name"], call.get("id")
        message = {"role": "tool", "name": name, "content": summary, "tool_call_id": number}
        return Called(message=message, failure="tool_error")

    async def _result(self, name: str, arguments: str) -> tuple[str, str | None]:
        found = self._tools.get(name)
        if found is None:
            self._note("tools/unknown")
            return f"Error: unknown tool `{name}`{nearest(name, self._tools)}", "unknown_tool"
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            self._note("tools/malformed")
            return f"Error: the arguments are not JSON: {error}", "malformed_arguments"
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
            # The limit starts second: waiting for a free thread is not the function's time.
            async with shared_semaphore("tools", THREADS_AT_ONCE), limit:
                return _as_text(await _in_thread(found.function, taken)), None
        except Exception as error:  # noqa: BLE001 - the boundary to users' code: the policy sees the error
            if limit.expired():
                self._note("tools/timeouts")
                return f"Error: `{found.name}` took longer than {self._seconds:g} s", "tool_error"
            self._note("tools/errors")
            kind = "" if isinstance(error, RlakeError) else f"{type(error).__name__}: "
            return f"Error: {kind}{str(error)[:1000]}", "tool_error"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


_threads = threading.BoundedSemaphore(MOST_THREADS)


async def _in_thread(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    # waiting here would block the event loop, and with it all rollouts
    if not _threads.acquire(blocking=False):
        raise JobError(f"{MOST_THREADS} calls of tools do not end")
    return await call_in_thread(lambda: function(**given), "rlake-tool", ended=_threads.release)

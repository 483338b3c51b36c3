"""Tools: schemas of functions, calls of them, and calls read from what models write."""

import asyncio
import threading
from collections import Counter
from time import process_time
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from rlake.loop.environments.gymnasium import action_in
from rlake.loop.environments.sql import query_in
from rlake.loop.environments.tools import Called, Toolbox, tool
from rlake.loop.models.tool_calls import FORMATS, assistant_message
from rlake.operators.failed_step import FAILED, failure_pattern
from rlake.store.errors import ConfigError


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b (int): the second
    """
    return a + b


async def search(
    query: Annotated[str, Field(description="what to look for")],
    *,
    where: Literal["web", "files"] = "web",
    limits: list[int] | None = None,
) -> dict[str, Any]:
    """Look something up."""
    await asyncio.sleep(0)
    return {"found": query, "where": where, "limits": limits}


def call(
    name: str, arguments: str, *, seconds: float = 5.0, longest: int = 300
) -> tuple[Called, Counter[str]]:
    """Call one tool of a box, and return what was noted."""
    noted: Counter[str] = Counter()
    box = Toolbox(
        [add, search, fails, leaves, long, never, waits, odd],
        seconds=seconds,
        longest=longest,
        note=lambda name: noted.update([name]),
    )
    asked = {"id": "call00000", "function": {"name": name, "arguments": arguments}}
    return asyncio.run(box.call(asked)), noted


def fails() -> None:
    raise KeyError("no such page")


def leaves() -> None:
    raise SystemExit(3)


def long() -> str:
    return "x" * 10_000_000


held = threading.Event()


def never() -> None:
    held.wait()


async def waits() -> None:
    await asyncio.Event().wait()


def odd() -> object:
    return {"name": "\ud83d", "set": {1}}


def test_a_functions_signature_and_docstring_are_its_schema() -> None:
    assert tool(add).spec == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first"},
                    "b": {"type": "integer", "default": 1, "description": "the second"},
                },
                "required": ["a"],
            },
        },
    }
    properties = tool(search).parameters["properties"]
    assert properties["query"] == {"type": "string", "description": "what to look for"}
    assert properties["where"]["enum"] == ["web", "files"]


def test_a_function_is_called_with_what_its_types_make_of_the_arguments() -> None:
    called, noted = call("add", '{"a": "2"}')
    message = {"role": "tool", "name": "add", "content": "3", "tool_call_id": "call00000"}
    assert called.message == message
    assert called.failure is None
    assert noted == {"tools/calls": 1}
    called, _ = call("search", '{"query": "x", "limits": [1, 2]}')
    assert called.message["content"] == '{"found": "x", "where": "web", "limits": [1, 2]}'


@pytest.mark.parametrize(
    ("name", "arguments", "failure", "metric", "said"),
    [
        ("ad", "{}", "unknown_tool", "unknown", "unknown tool `ad`; did you mean `add`"),
        ("", "{oh", "malformed_arguments", "malformed", "not a call of a tool: {oh"),
        ("add", '{"a": ', "malformed_arguments", "malformed", "not JSON"),
        ("add", "[" * 100_000, "malformed_arguments", "malformed", "not JSON"),
        ("add", "[1]", "malformed_arguments", "unfit", "expected an object, got list"),
        ("add", '{"a": "two"}', "malformed_arguments", "unfit", "`a`: Input should be a valid"),
        ("add", '{"a": 1, "c": 2}', "malformed_arguments", "unfit", "`c`: Unexpected keyword"),
        ("add", "", "malformed_arguments", "unfit", "`a`: Missing required"),
        ("fails", "{}", "tool_error", "errors", "KeyError: 'no such page'"),
        ("leaves", "{}", "tool_error", "errors", "Error: SystemExit: 3"),
    ],
)
def test_what_goes_wrong_is_told_to_the_policy_and_counted(
    name: str, arguments: str, failure: str, metric: str, said: str
) -> None:
    called, noted = call(name, arguments)
    content = called.message["content"]
    assert said in content
    assert failure_pattern(FAILED).search(content)  # so operators know a step that failed
    assert called.failure == failure
    assert noted == {"tools/calls": 1, f"tools/{metric}": 1}
    assert called.message["role"] == ("tool" if name else "user")


@pytest.mark.parametrize("name", ["never", "waits"])
def test_a_tool_that_takes_too_long_is_given_up(name: str) -> None:
    called, noted = call(name, "{}", seconds=0.05)
    assert called.message["content"] == f"Error: `{name}` took longer than 0.05 s"
    assert (called.failure, noted["tools/timeouts"]) == ("tool_error", 1)
    held.set()


def test_a_result_of_ten_megabytes_is_cut_and_says_so() -> None:
    called, noted = call("long", "{}")
    content = called.message["content"]
    assert content.startswith("x" * 300 + "\n[cut: these are the first 300 of 10000000")
    assert len(content) < 400
    assert noted["tools/truncated"] == 1
    assert called.failure is None


def test_a_result_that_is_no_text_is_json_and_can_be_stored() -> None:
    assert call("odd", "{}")[0].message["content"] == '{"name": "?", "set": "{1}"}'


def takes_anything(value: threading.Event) -> None:
    """Wants what JSON has not."""


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        (["add"], "no tool `add`; write `package.module:function`"),
        (["math:nobody"], "no tool `math:nobody`"),
        (["math:pi"], "`math:pi` must be a function, got float"),
        ([add, add], "two tools `add`"),
        ([takes_anything], "`takes_anything` cannot be a tool"),
    ],
)
def test_tools_named_wrongly_say_how(tools: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Toolbox(tools)


def test_a_tool_is_named_by_its_module_and_is_still_a_function() -> None:
    box = Toolbox(["os.path:basename"])
    assert [one["function"]["name"] for one in box.specs] == ["basename"]
    assert tool(tool(add))(1, b=2) == 3


CALL = ("add", '{"a": 1}')
READ = [
    ("hermes", 'so <tool_call>{"name":"add","arguments":{"a":1}}</tool_call>', "so", [CALL]),
    ("hermes", '<tool_call>{"name":"add","arguments":{"a":1}}', "", [CALL]),
    ("hermes", "<tool_call>add(1)</tool_call>", "", [("", "add(1)")]),
    ("hermes", "just text", "just text", []),
    ("llama", '{"name": "add", "parameters": {"a": 1}}', "", [CALL]),
    (
        "llama",
        '<|python_tag|>{"name":"add","parameters":{"a":1}}; {"name":"f"}',
        "",
        [CALL, ("f", "{}")],
    ),
    ("llama", "<|python_tag|>add.call(a=1)", "", [CALL]),
    ("llama", "<|python_tag|>add.call(a=open('x'))", "", [("", "add.call(a=open('x'))")]),
    ("llama", "<|python_tag|>import os", "", [("", "import os")]),
    ("mistral", 'ok[TOOL_CALLS][{"name":"add","arguments":{"a":1}}]', "ok", [CALL]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{}', "", [CALL, ("f", "{}")]),
    ("mistral", "[TOOL_CALLS]nonsense", "", [("", "nonsense")]),
    ("json", '```json\n[{"name": "add", "arguments": {"a": 1}}]\n```', "", [CALL]),
    ("json", '\n```json\n{"name": "add", "arguments": {}}\n```\n', "", [("add", "{}")]),
    ("json", '{"answer": 4}', '{"answer": 4}', []),
    ("json", '{"name": "add", "arguments": {', "", [("", '{"name": "add", "arguments": {')]),
]


@pytest.mark.parametrize(("tool_call_format", "text", "content", "calls"), READ)
def test_calls_are_read_as_models_write_them(
    tool_call_format: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    message = assistant_message(text, [{"type": "function"}], tool_call_format=tool_call_format)
    assert message["content"] == content
    made = [one["function"] for one in message.get("tool_calls", [])]
    assert [(one["name"], one["arguments"]) for one in made] == calls


@pytest.mark.parametrize(
    ("tool_call_format", "before"),
    [
        ("hermes", '<tool_call>{"name":'),
        ("json", "```"),
        ("llama", "<|python_tag|>a.call("),
        ("mistral", "[TOOL_CALLS]a"),
    ],
)
def test_a_long_run_of_blanks_in_a_call_holds_nobody_up(tool_call_format: str, before: str) -> None:
    began = process_time()
    assistant_message(f"{before}{' ' * 20_000}x", [{}], tool_call_format=tool_call_format)
    assert process_time() - began < 1  # as the square of the blanks: many seconds


def test_tags_that_never_close_hold_nobody_up() -> None:
    began = process_time()
    assert action_in("<action>" * 10_000 + "up</action>", ["up", "down"]) == 0
    assert query_in("<sql>" * 10_000 + "SELECT 1</sql>") == "SELECT 1"
    assert action_in("<action>" * 10_000, ["up"]) is None
    assert query_in("<sql>" * 10_000).startswith("<sql>")
    assert process_time() - began < 1


@pytest.mark.parametrize("tool_call_format", sorted(FORMATS))
def test_without_tools_an_answer_is_text_however_it_looks(tool_call_format: str) -> None:
    text = '<tool_call>{"name": "add"}</tool_call>[TOOL_CALLS][]'
    assert assistant_message(text, None, tool_call_format=tool_call_format) == {
        "role": "assistant",
        "content": text,
    }


@pytest.mark.parametrize("tool_call_format", sorted(FORMATS))
@pytest.mark.parametrize("marks", ["<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", ""])
def test_deeply_nested_nonsense_is_a_call_that_cannot_be_read_or_text(
    tool_call_format: str, marks: str
) -> None:
    message = assistant_message(
        marks + '[{"name":' * 20_000, [{}], tool_call_format=tool_call_format
    )
    assert all(not one["function"]["name"] for one in message.get("tool_calls", []))


def test_an_id_that_the_model_wrote_is_kept() -> None:
    text = '[TOOL_CALLS][{"name": "add", "arguments": {}, "id": "abc123xyz"}]'
    [one] = assistant_message(text, [{}], tool_call_format="mistral")["tool_calls"]
    assert one["id"] == "abc123xyz"

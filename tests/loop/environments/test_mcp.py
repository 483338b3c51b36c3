"""Tools of real MCP servers, over streams and over HTTP."""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import listening
from support.rollouts import rollouts

from rlake.loop.environments.mcp import close_servers, mcp_tools
from rlake.loop.environments.tools import Called, Toolbox
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.store import Task
from rlake.store.errors import ConfigError, JobError

PROGRAM = str(Path(__file__).parents[2] / "support" / "mcp_server.py")
STREAMS: dict[str, Any] = {"command": [sys.executable, PROGRAM], "start_seconds": 200}


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    asyncio.run(close_servers())


def call(
    name: str, arguments: str = "{}", *, seconds: float = 100.0
) -> tuple[Called, Counter[str]]:
    """Call a tool of the server, in a loop of its own."""
    noted: Counter[str] = Counter()

    async def once() -> Called:
        box = Toolbox(
            await mcp_tools({"small": STREAMS}),
            seconds=seconds,
            note=lambda name: noted.update([name]),
        )
        return await box.call({"id": "1", "function": {"name": name, "arguments": arguments}})

    return asyncio.run(once()), noted


@pytest.mark.slow
def test_one_process_serves_tries_of_several_loops_and_is_started_again_when_it_died(
    tmp_path: Path,
) -> None:
    assert call("add", '{"a": 2, "b": 40}')[0].message["content"] == "42"
    first = call("process")[0].message["content"]
    assert call("process")[0].message["content"] == first
    failed, noted = call("breaks")
    assert failed.message["content"] == "Error: Error executing tool breaks"
    assert (failed.failure, noted["tools/errors"]) == ("tool_error", 1)
    path = tmp_path / "there"
    path.touch()
    late, noted = call("hangs", f'{{"path": "{path}"}}', seconds=0.2)
    assert (late.failure, noted["tools/timeouts"]) == ("tool_error", 1)
    path.unlink()
    died, _ = call("dies")
    assert died.failure == "tool_error"
    again = call("process")[0]
    assert again.failure is None
    assert again.message["content"] != first


@pytest.mark.slow
def test_a_policy_uses_a_server_over_http() -> None:
    with listening([sys.executable, PROGRAM]) as address:
        servers = {"small": {"url": f"{address}/mcp", "tools": ["add"], "start_seconds": 200}}
        asked = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 40}}</tool_call>'
        policy = ScriptedPolicy(lambda messages, i: "42" if len(messages) > 1 else asked)
        how: Any = {"rewards": "exact_match", "group_size": 3}
        rows = rollouts(policy, {"react": {"mcp": servers}}, Task.ask("2+40?", "42"), **how)
        assert {(row.drop_reason, row.reward) for row in rows} == {(None, 1.0)}
        assert {
            m["content"] for row in rows for m in row.messages or () if m["role"] == "tool"
        } == {"42"}
        asyncio.run(close_servers())


def test_a_program_that_is_no_server_is_an_error_in_time() -> None:
    missing = {"command": ["/no/such/program"]}
    with pytest.raises(JobError, match="the MCP server `gone` cannot be used: FileNotFoundError"):
        asyncio.run(mcp_tools({"gone": missing}))
    program = [sys.executable, "-c", "import sys; list(sys.stdin)"]
    silent = {"command": program, "start_seconds": 0.3}
    with pytest.raises(JobError, match=r"it did not answer within 0\.3 s"):
        asyncio.run(mcp_tools({"silent": silent}))


@pytest.mark.parametrize(
    "spec", [{}, {"command": ["x"], "url": "http://x"}, {"url": "http://x", "port": 3}]
)
def test_a_server_named_wrongly_says_how(spec: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the MCP server `odd`"):
        asyncio.run(mcp_tools({"odd": spec}))

"""Agents of frameworks that know nothing of rlake: what they ask becomes rows all the same."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from support.scripted_models import parrot, spoken

from rlake.loop.chat_api.recording import record
from rlake.store import Experience, Task

pytestmark = pytest.mark.slow

TASK = Task.ask("2+3=", "5")
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
AGENTSCOPE = Path(sys.prefix) / "agentscope" / "bin" / "python"
FILES = Path(__file__).parents[2] / "files"


@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_an_agent_of_the_openai_agents_sdk_becomes_a_row() -> None:
    from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool

    @function_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    policy = parrot(CALL, "5")

    async def go() -> tuple[str, list[Experience]]:
        async with record(policy, TASK) as session:
            agent = Agent(
                name="calculator",
                instructions="You add.",
                model=OpenAIChatCompletionsModel("policy", session.client),
                tools=[add],
            )
            quiet = RunConfig(tracing_disabled=True)
            done = await Runner.run(agent, "2+3=", run_config=quiet)
            return str(done.final_output), session.rows()

    answer, [row] = asyncio.run(go())
    text, sampled = spoken(row, policy)
    assert (answer, sampled) == ("5", [f"{CALL}<eos>", "5<eos>"])
    assert text.startswith("[tool add]\nsystem: You add.\nuser: 2+3=\nassistant: ")
    assert text.endswith("\ntool: 5\nassistant: 5<eos>")


@pytest.mark.skipif(not AGENTSCOPE.exists(), reason="needs agentscope; `make .venv/.agentscope`")
def test_an_agent_of_agentscope_in_an_environment_of_its_own_becomes_a_row() -> None:
    policy = parrot(CALL, "5")

    async def go() -> tuple[str, list[Experience]]:
        async with record(policy, TASK) as session:
            answer = await _in_agentscope(session.base_url, session.api_key, "2+3=")
            return answer, session.rows()

    answer, [row] = asyncio.run(go())
    text, sampled = spoken(row, policy)
    assert (answer, sampled) == ("5", [f"{CALL}<eos>", "5<eos>"])
    assert "[tool add]\nsystem: You add." in text


async def _in_agentscope(url: str, key: str, prompt: str) -> str:
    """Run the agent in another process, with another's packages."""
    given = [str(FILES / "agentscope_agent.py"), url, key, prompt]
    process = await asyncio.create_subprocess_exec(AGENTSCOPE, *given, stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(100):
            said, failed = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, failed.decode()
    return said.decode().strip()

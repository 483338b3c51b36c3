"""An agent of AgentScope that is a program: it answers once.

For `agent_program`. AgentScope's packages differ from rlake's, so that the program goes on in the
environment of `AGENTSCOPE_PYTHON`; it needs nothing of rlake.
"""
# pyright: reportMissingImports=false

import asyncio
import os
import sys
from importlib.util import find_spec
from shutil import which


async def answer(question: str) -> str:
    """Return the agent's answer to a question."""
    from agentscope.agent import Agent
    from agentscope.credential import OpenAICredential
    from agentscope.message import UserMsg
    from agentscope.model import OpenAIChatModel

    env = os.environ
    api = OpenAICredential(api_key=env["OPENAI_API_KEY"], base_url=env["OPENAI_BASE_URL"])
    model = OpenAIChatModel(api, model=env["OPENAI_MODEL"])
    agent = Agent(name="sorter", system_prompt="sort", model=model)
    reply = await agent.reply(UserMsg(name="user", content=question))
    return str(reply.get_text_content() or "")


def main() -> None:
    """Answer the question of the standard input."""
    if find_spec("agentscope") is None:
        _go_on_in(os.environ.pop("AGENTSCOPE_PYTHON", None) or sys.executable)
    print(asyncio.run(answer(sys.stdin.read())))  # noqa: T201 - it is the answer


def _go_on_in(python: str) -> None:
    found = which(python)
    if found is None or python == sys.executable:
        raise SystemExit(
            f"`{python}` has no agentscope; install it with `python -m venv agentscope && "
            "agentscope/bin/pip install 'agentscope>=2,<3'`, and name its python in "
            "`AGENTSCOPE_PYTHON`"
        )
    os.execv(found, [found, "-P", __file__])  # -P: modules beside this file are not the agent's


if __name__ == "__main__":
    main()

"""An agent of AgentScope, run where nothing of rlake is installed: python FILE URL KEY PROMPT."""
# pyright: reportMissingImports=false

import asyncio
import sys

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


async def main(url: str, key: str, prompt: str) -> None:
    """Let the agent answer, and print its answer."""
    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="it only adds")
    agent = Agent(
        name="calculator",
        system_prompt="You add.",
        model=OpenAIChatModel(OpenAICredential(api_key=key, base_url=url), model="policy"),
        toolkit=Toolkit([FunctionTool(add, permission=allowed)]),
    )
    reply = await agent.reply(UserMsg(name="user", content=prompt))
    print(reply.get_text_content())  # noqa: T201 - it is what the test reads


asyncio.run(main(*sys.argv[1:]))

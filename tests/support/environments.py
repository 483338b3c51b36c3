"""Agents as anybody writes them, to be trained: `{agent: {function: "acting:..."}}`."""

import json
import threading
import zlib
from typing import Any

import openai

from rlake.loop.chat_api.recording import record
from rlake.loop.inference.policy import Policy
from rlake.store import Experience, Task

ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


async def calculator(client: openai.AsyncOpenAI, prompt: str, *, stream: bool = False) -> str:
    """Lets the model call a tool, until it answers."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    while True:
        said = await (_streamed if stream else _asked)(client, messages)
        messages.append(said)
        if not said.get("tool_calls"):
            return said["content"]
        for call in said["tool_calls"]:
            given = json.loads(call["function"]["arguments"])
            content = str(given["a"] + given["b"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


async def _asked(client: openai.AsyncOpenAI, messages: list[Any]) -> dict[str, Any]:
    made = await client.chat.completions.create(model="gpt", messages=messages, tools=[ADD])
    return made.choices[0].message.model_dump(exclude_none=True)


async def _streamed(client: openai.AsyncOpenAI, messages: list[Any]) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    stream = await client.chat.completions.create(
        model="gpt", messages=messages, tools=[ADD], stream=True
    )
    async for piece in stream:
        delta = piece.choices[0].delta
        said["content"] += delta.content or ""
        for call in delta.tool_calls or ():
            said["tool_calls"].append(call.model_dump(exclude={"index"}))
    return said


async def through_a_client(task: Task, policy: Policy) -> float:
    """A workflow whose agent speaks OpenAI; it returns its reward alone."""
    async with record(policy, task) as session:
        messages: Any = list(task.messages)
        made = await session.client.chat.completions.create(model="m", messages=messages)
    return (made.choices[0].message.content or "").count("1") / 3


def blocking(client: openai.OpenAI, messages: list[Any], *, prefix: str = "") -> str:
    """Asks once, and blocks meanwhile."""
    made = client.chat.completions.create(model="m", messages=messages)
    return prefix + (made.choices[0].message.content or "")


async def by_address(base_url: str, api_key: str, model: str, task: Task) -> dict[str, float]:
    """Makes a client of its own, asks twice in different words, and judges itself."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for asked in (task.prompt_text or "", "Are you sure?"):
            messages: Any = [{"role": "user", "content": asked}]
            await client.chat.completions.create(model=model, messages=messages)
    return {"care": 0.5, "luck": 0.25}


async def silent(client: openai.AsyncOpenAI, prompt: str) -> None:
    """Asks, and keeps the answer to itself."""
    messages: Any = [{"role": "user", "content": prompt}]
    await client.chat.completions.create(model="m", messages=messages)


async def idle(client: openai.AsyncOpenAI) -> str:
    """Knows without asking."""
    return "5"


async def deaf(prompt: str) -> str:
    """Takes nothing that it could ask with."""
    return prompt


async def choosy(client: openai.AsyncOpenAI, knife: str) -> str:
    """Needs what only a configuration can give."""
    return knife


MAY_END = threading.Event()
"""What `stuck` waits for."""
ENDED = threading.Event()


def stuck(client: openai.OpenAI) -> str:
    """Blocks for much longer than its try may take."""
    MAY_END.wait(60)
    ENDED.set()
    return "5"


def varied(task: Task, experience: Experience) -> float:
    """A reward that differs between answers."""
    return zlib.crc32((experience.response_text or "").encode()) / 2**32

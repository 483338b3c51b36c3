"""Connections of a real server in this process: idle ones make room, and slow ones end."""

import asyncio

import httpx
from support.serving import chat, listening

from rlake.loop.chat_api.app import create_app
from rlake.loop.config import LimitsConfig
from rlake.loop.inference.scripted import ScriptedPolicy


def test_more_connections_than_there_may_be_close_those_that_ask_for_nothing() -> None:
    async def work() -> None:
        async with listening(create_app(ScriptedPolicy(["4"])), most=8) as url:
            port = httpx.URL(url).port
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
            async with httpx.AsyncClient(base_url=url) as client:
                answer = await client.post("/v1/chat/completions", json=chat("2+2="))
                assert answer.status_code == 200
            # the first ones were closed, the newest are open still
            closed = [reader.at_eof() or not await _is_open(reader) for reader, _ in opened[:30]]
            assert all(closed)
            for _, writer in opened:
                writer.transport.abort()

    asyncio.run(work())


def test_a_request_whose_headers_do_not_come_in_time_is_hung_up_on() -> None:
    limits = LimitsConfig(header_seconds=0.05)

    async def work() -> None:
        async with listening(create_app(ScriptedPolicy(["4"])), limits=limits, most=8) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: 127")
            assert not await _is_open(reader)
            writer.close()

    asyncio.run(work())


async def _is_open(reader: asyncio.StreamReader) -> bool:
    try:
        return bool(await asyncio.wait_for(reader.read(1), 20))
    except ConnectionError:
        return False

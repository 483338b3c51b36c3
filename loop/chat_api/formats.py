"""The APIs that are served, each by how its requests are read and its answers written."""

from typing import Any

from . import responses, responses_api, text_completions
from .exchange import ChatExchange, Format
from .requests import read_chat


def _whole_chat(exchange: ChatExchange) -> dict[str, Any]:
    head = exchange.head("chat.completion")
    return responses.response(head, exchange.asked, exchange.completions, exchange.token_text)


def _chat_chunks(exchange: ChatExchange) -> responses.Chunks:
    head = exchange.head("chat.completion.chunk")
    return responses.Chunks(head, exchange.asked, exchange.token_text)


CHAT = Format("chat", "chatcmpl-", read_chat, _whole_chat, _chat_chunks)
COMPLETIONS = Format(
    "completions",
    "cmpl-",
    text_completions.read,
    text_completions.whole,
    text_completions.TextChunks,
)
RESPONSES = Format(
    "responses",
    "resp_",
    responses_api.read,
    responses_api.whole,
    responses_api.ResponseEvents,
    event=responses_api.event,
    done=(),
)

"""Chat logs in the OpenAI shape: fine-tuning lines, and requests with their responses."""

import json
from typing import Any

from ...raw_json import Raw, dumps, elements, listed, members
from .format import TOKENS, Format, Ours, Row, aligned, messages, others, short, wrong

_USED = ("messages", "tools", "reward")
_OF_RESPONSE = ("id", "model", "created", "system_fingerprint", "usage")


def experiences(row: Row) -> list[Ours]:
    """Give the conversation; of a request with a response, one for each choice."""
    if "request" in row:
        return _answered(row)
    if "messages" not in row:
        raise wrong("`messages` is missing, expected a conversation")
    return [
        {
            "messages": row.conversation("messages"),
            "tools": _tools(row.json("tools")),
            "reward": row.number("reward"),
            "metadata": others(row, _USED),
        }
    ]


def _answered(row: Row) -> list[Ours]:
    request, response = _body(row, "request"), _body(row, "response")
    asked = messages(request.get("messages", "null"), "request.messages")
    made = []
    for choice in elements(response.get("choices", "[]")):
        parts = members(choice)
        if "message" not in parts:
            raise wrong(f"a choice must have a `message`, got {short(choice)}")
        made.append(
            {
                "messages": listed([*asked, parts["message"]]),
                "num_asked": len(asked),
                "tools": _tools(request.get("tools")),
                "finish_reason": json.loads(parts.get("finish_reason", "null")),
                "reward": row.number("reward"),
                "metadata": _metadata(row, request, response),
            }
            | _tokens(parts, response)
        )
    if not made:
        raise wrong(f"the response has no `choices`, got {short(dict(response))}")
    return made


def _body(row: Row, name: str) -> dict[str, str]:
    """Return the members of a request or response; those of its `body` where it has one."""
    text = row.json(name)
    if text is None or not isinstance(json.loads(text), dict):
        raise wrong(f"`{name}` must be an object, got {short(row.get(name))}")
    parts = members(text)
    is_wrapped = "body" in parts and parts["body"].startswith("{")
    return members(parts["body"]) if is_wrapped else parts


def _metadata(row: Row, request: dict[str, str], response: dict[str, str]) -> Raw | None:
    """Keep the request's settings and what the response says of itself."""
    kept = {k: v for k, v in request.items() if k not in ("messages", "tools")}
    kept |= {k: response[k] for k in _OF_RESPONSE if response.get(k, "null") != "null"}
    rest = others(row, ("request", "response", "reward"))
    kept |= members(rest) if rest else {}
    return Raw("{" + ", ".join(f"{dumps(k)}: {v}" for k, v in kept.items()) + "}") if kept else None


def _tools(text: str | None) -> str | None:
    return None if text is None or text in ("null", "[]") else text


def _tokens(choice: dict[str, str], response: dict[str, str]) -> Ours:
    """Return the tokens as sampled, where the server gave their ids; text alone gives none."""
    sampled = json.loads(choice.get("token_ids", "null"))
    prompt = json.loads(response.get("prompt_token_ids", choice.get("prompt_token_ids", "null")))
    if not sampled or not prompt:
        return {}
    message: Any = json.loads(choice.get("logprobs", "null"))
    each = message.get("content") if isinstance(message, dict) else None
    return aligned(prompt, sampled, logprobs=[t["logprob"] for t in each] if each else None)


CHAT = Format(
    "chat",
    'OpenAI\'s {"messages", "tools"}, or {"request", "response"} of chat completions',
    needs=(frozenset({"messages"}), frozenset({"request", "response"})),
    known_by=(frozenset({"messages", "parallel_tool_calls"}), frozenset({"request", "response"})),
    columns=("messages", "num_asked", "tools", "finish_reason", "reward", "metadata", *TOKENS),
    rows=experiences,
    has_tasks=True,
)

"""Makes trajectories.jsonl: what agents log when they call tools, in the shapes of OpenAI's API.

Run with `python tests/files/make_trajectories.py`. The customers, orders and tools are made up; the
shapes are those of tool-calling benchmarks: calls side by side, results out of order, errors, and
conversations that end on a tool or a user.
"""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SYSTEM = {"role": "system", "content": "You help the customers of a shop.\nCall one tool or more."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}},
        },
    }
    for name, about, key in (
        ("find_user", "Find a user.", "name"),
        ("order", "Look an order up.", "order_id"),
        ("refund", "Pay an order back.", "order_id"),
    )
]

Message = dict[str, Any]


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def answer(content: Any, *calls: Message) -> Message:
    return {"role": "assistant", "content": content} | ({"tool_calls": [*calls]} if calls else {})


def call(number: int, name: str, arguments: Any) -> Message:
    # nine letters and digits, which every chat template takes
    return {
        "id": f"call{number:05d}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def result(number: int, content: str, **rest: Any) -> Message:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "content": content, **rest}


NESTED = {
    "order_id": "W-1",
    "lines": [{"sku": "é-½", "price": 1.5, "big": 12345678901234567890123}],
}
BEGIN = [
    SYSTEM,
    user("Bonjour, I am Zoë 😀. Where are my orders W-1 and W-2?"),
    answer(None, call(1, "find_user", '{"name":  "Zo\\u00eb"}')),
    result(1, '{"user": "zoe_1", "orders": ["W-1", "W-2"]}'),
    answer(
        "Let me look both up.",
        call(2, "order", '{"order_id": "W-1"}'),
        call(3, "order", '{"order_id": "W-2"}'),
    ),
    result(3, "Error: order not found"),
    result(2, '{"status": "sent", "error": null}'),
]
TRAJECTORIES: list[dict[str, Any]] = [
    {"messages": BEGIN, "reward": 0.0, "trial": 0},
    {
        "messages": [
            *BEGIN,
            answer("W-1 is on its way. I cannot find W-2."),
            user("That is all. ###STOP###"),
        ],
        "reward": 1.0,
        "trial": 1,
    },
    {
        "messages": [
            *BEGIN,
            answer("", call(4, "refund", NESTED)),
            result(4, '{"error": "not allowed"}', is_error=True),
            answer("I may not pay W-1 back."),
        ],
        "reward": 0.0,
        "trial": 2,
    },
    {
        "messages": [
            user("Find Ann."),
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "find_user", "arguments": '{"name": "Ann"}'},
            },
            {"role": "function", "name": "find_user", "content": "ann_7"},
        ],
        "reward": 1.0,
        "trial": 0,
    },
    {
        "messages": [
            user([{"type": "text", "text": "Is order "}, {"type": "text", "text": "W-3 paid?"}]),
            answer([{"type": "text", "text": "Yes, it is paid."}]),
        ],
        "reward": 1.0,
        "trial": 0,
    },
    {"messages": [SYSTEM, user("Hello? Is nobody there?")], "reward": 0.0, "trial": 0},
]


def main() -> None:
    with (HERE / "trajectories.jsonl").open("w", encoding="utf-8") as out:
        for row in TRAJECTORIES:
            talk = row.pop("messages")
            line = {"messages": talk, "tools": TOOLS, "parallel_tool_calls": True, **row}
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

"""OpenAI's responses API by its client over HTTP, on a real model."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from support.served_models import FORM, TOOLS, check_rows, policy, served, with_tools

from rlake.store import Store


def test_responses_continue_each_other_and_are_one_row(store: Store, tmp_path: Path) -> None:
    async def ask(client: AsyncOpenAI) -> tuple[Any, Any, list[Any]]:
        make: Any = client.responses.create
        how = {"model": "m", "max_output_tokens": 6, "temperature": 0}
        first = await make(**how, input="1+1=", instructions="Add.")
        second = await make(**how, input="2+2=", previous_response_id=first.id, instructions="Add.")
        events = []
        form: Any = {"format": {"type": "json_schema", **FORM["json_schema"]}}
        async with client.responses.stream(
            model="m", input="3+3=", text=form, temperature=0
        ) as made:
            events += [event async for event in made]
            final = await made.get_final_response()
        cut = [event async for event in await make(**how, input="4+4=", stream=True)]
        assert cut[-1].type == "response.incomplete"
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(texts) == final.output_text
        with pytest.raises(openai.NotFoundError, match="send the whole conversation") as error:
            await make(**how, input="a", previous_response_id="resp_none")
        assert error.value.param == "previous_response_id"
        for bad, param in (
            ({"reasoning": {"effort": "low"}}, "reasoning"),
            ({"background": True}, "background"),
            ({"tools": [{"type": "web_search"}]}, "tools.0"),
            ({"include": ["reasoning.encrypted_content"]}, "include"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"input": [{"type": "image"}]}, "input.0"),
            ({"conversation": "c"}, "conversation"),
        ):
            with pytest.raises(openai.BadRequestError) as error:
                await make(**{"model": "m", "input": "a"} | bad)
            assert error.value.param == param
        return first, second, events

    first, second, events = served(store, tmp_path, policy(), ask)
    assert first.status == "incomplete"
    assert first.usage.output_tokens == 6
    rows = check_rows(store)
    assert [row["num_turns"] for row in rows] == [2, 1, 1]
    said = json.loads(rows[0]["messages"])
    assert [m["role"] for m in said] == ["system", *["user", "assistant"] * 2]
    assert said[-1]["content"] == second.output_text
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events][:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]


def test_tools_of_responses_are_called_and_answered(store: Store, tmp_path: Path) -> None:
    flat: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]

    async def ask(client: AsyncOpenAI) -> None:
        make: Any = client.responses.create
        choice: Any = {"type": "function", "name": "paint"}
        forced = {"tools": flat, "tool_choice": choice, "temperature": 0}
        made = await make(model="m", input="go", store=False, **forced)
        [call] = made.output
        assert (call.type, call.name) == ("function_call", "paint")
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        items = [{"role": "user", "content": "go"}, call.model_dump(), output]
        how = {
            "model": "m",
            "tools": flat,
            "store": False,
            "max_output_tokens": 5,
            "temperature": 0,
        }
        answer = await make(input=items, **how)
        assert answer.output_text
        async with client.responses.stream(
            model="m", input="go", tools=flat, tool_choice=choice, temperature=0
        ) as streamed:
            kinds = [event.type async for event in streamed]
            final = await streamed.get_final_response()
        assert "response.function_call_arguments.done" in kinds
        assert [item.type for item in final.output] == ["function_call"]

    served(store, tmp_path, with_tools(), ask)
    said = [json.loads(row["messages"]) for row in check_rows(store)]
    assert [m["role"] for m in said[1]] == ["user", "assistant", "tool", "assistant"]
    assert said[1][2]["content"] == "done"


def test_the_oldest_messages_are_left_out_only_if_asked(store: Store, tmp_path: Path) -> None:
    items: Any = [
        {"role": "system", "content": "S"},
        *({"role": r, "content": "x" * 200} for r in ("user", "assistant", "user", "assistant")),
        {"role": "user", "content": "last"},
    ]

    async def ask(client: AsyncOpenAI) -> None:
        make: Any = client.responses.create
        how = {"model": "m", "max_output_tokens": 5, "store": False}
        with pytest.raises(openai.BadRequestError, match="the model takes 512"):
            await make(input=items, **how)
        made = await make(input=items, truncation="auto", **how)
        assert made.usage.input_tokens == len("S" + "x" * 400 + "last") + 1  # an end token
        with pytest.raises(openai.BadRequestError, match="the model takes 512"):
            await make(input="x" * 600, truncation="auto", **how)  # nothing would be left

    served(store, tmp_path, policy(), ask)
    [row] = check_rows(store)
    assert len(json.loads(row["messages"])) == 5

"""The client `openai` over HTTP: its parameters are honored by a real model, or refused."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from support.served_models import (
    ASK,
    FORM,
    SCHEMA,
    SPEC,
    TOOLS,
    check_rows,
    likelihoods,
    policy,
    served,
    with_tools,
)
from support.tiny_models import speaking, table, tiny

from rlake.store import Store


@pytest.mark.parametrize("how", ["whole", "streamed"])
def test_log_probs_are_given_as_asked_whole_and_streamed(
    store: Store, tmp_path: Path, how: str
) -> None:
    stream = how == "streamed"

    async def ask(client: AsyncOpenAI) -> list[Any]:
        more: Any = {"max_tokens": 8, "logprobs": True, "top_logprobs": 3, "stream": stream}
        made: Any = await client.chat.completions.create(model="m", messages=ASK, seed=1, **more)
        if not stream:
            return made.choices[0].logprobs.content
        parts = [part.choices[0].logprobs async for part in made]
        return [token for part in parts if part is not None for token in part.content]

    told = served(store, tmp_path, policy(), ask)
    [row] = check_rows(store)
    start = row["prompt_length"]
    assert [t.logprob for t in told] == pytest.approx(row["logprobs"][start:], abs=1e-6)
    truth_TV = likelihoods(row["token_ids"])[start - 1 : -1]
    tokenizer = tiny(**SPEC)[1]
    for token, truth_V in zip(told, truth_TV, strict=True):
        best = truth_V.topk(3)
        assert [t.logprob for t in token.top_logprobs] == pytest.approx(
            best.values.tolist(), abs=1e-4
        )
        texts = [tokenizer.decode([i], skip_special_tokens=True) for i in best.indices.tolist()]
        assert [t.token for t in token.top_logprobs] == texts
    assert row["sampling"] is None


def test_raw_prompts_are_continued_without_a_template(store: Store, tmp_path: Path) -> None:
    tokenizer = tiny(**SPEC)[1]
    ids = tokenizer("ab", add_special_tokens=False)["input_ids"]

    async def ask(client: AsyncOpenAI) -> tuple[Any, str]:
        make: Any = client.completions.create
        whole = await make(model="m", prompt=["Once", ids], max_tokens=5, n=2, logprobs=2, seed=3)
        text = ""
        async for part in await make(model="m", prompt="Once", max_tokens=5, seed=3, stream=True):
            text += part.choices[0].text
        with pytest.raises(openai.BadRequestError, match="one `prompt`") as error:
            await make(model="m", prompt=["a", "b"], stream=True)
        assert error.value.param == "stream"
        for bad, param in (
            ({"prompt": ""}, "messages"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [[]]}, "prompt"),
            ({"prompt": [9999]}, "prompt"),
            ({"prompt": "a", "echo": True}, "echo"),
            ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ):
            with pytest.raises(openai.BadRequestError) as error:
                await make(model="m", **bad)
            assert error.value.param == param
        return whole, text

    whole, streamed = served(store, tmp_path, policy(), ask)
    assert [c.index for c in whole.choices] == [0, 1, 2, 3]
    assert streamed == whole.choices[0].text != whole.choices[1].text
    first = whole.choices[0].logprobs
    assert len(first.tokens) == len(first.token_logprobs) == len(first.top_logprobs) == 5
    assert whole.usage.prompt_tokens == 6
    assert whole.usage.completion_tokens == sum(len(c.logprobs.tokens) for c in whole.choices)
    rows = check_rows(store)
    assert len(rows) == 5
    asked = [json.loads(row["messages"])[0] for row in rows]
    assert {m["content"] for m in asked} == {"Once", "ab"}
    assert all(m["is_raw"] for m in asked)
    assert [m["token_ids"] for m in asked if m["content"] == "ab"] == [ids, ids]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_follows_a_json_schema_and_its_row_says_so(
    store: Store, tmp_path: Path, temperature: float
) -> None:
    async def ask(client: AsyncOpenAI) -> list[str]:
        make: Any = client.chat.completions.create
        how = {"model": "m", "messages": ASK, "temperature": temperature, "seed": 1}
        made = await make(**how, response_format=FORM, n=3)
        flat: Any = {"format": {"type": "json_schema", **FORM["json_schema"]}}
        other: Any = await client.responses.create(
            model="m",
            input="1+1=",
            temperature=temperature,
            text=flat,
            store=False,
            extra_body={"seed": 1},
        )
        return [*(c.message.content for c in made.choices), other.output_text]

    told = served(store, tmp_path, policy(), ask)
    for text in told:
        value = json.loads(text)
        assert set(value) == {"color", "is_new"}
        assert value["color"] in ("red", "blue")
        assert isinstance(value["is_new"], bool)
    rows = check_rows(store)  # of the model's own distribution, however unlikely
    assert len(rows) == 4
    for row in rows:
        assert json.loads(json.loads(row["sampling"])["json_schema"]) == SCHEMA
        assert row["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "thing"}, "Unsupported type"),
        ({"type": "object", "required": "a"}, "required must be an array"),
        ({"not": {"type": "string"}}, "`not`, which cannot be enforced"),
        ({"type": "string", "pattern": "("}, "not closed"),
    ],
)
def test_a_schema_that_is_wrong_or_not_enforced_is_refused(
    store: Store, tmp_path: Path, schema: dict[str, Any], why: str
) -> None:
    async def ask(client: AsyncOpenAI) -> openai.BadRequestError:
        form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match=why) as error:
            await client.chat.completions.create(model="m", messages=ASK, response_format=form)
        return error.value

    assert served(store, tmp_path, policy(), ask).param == "response_format"
    assert table(store, "experiences").is_empty()


def test_a_model_that_cannot_write_what_is_asked_for_refuses(store: Store, tmp_path: Path) -> None:
    async def ask(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="no token that can begin"):
            await client.chat.completions.create(
                model="m", messages=ASK, response_format={"type": "json_object"}
            )

    served(store, tmp_path, speaking(alphabet="0123456789+="), ask)
    assert table(store, "experiences").is_empty()


def test_an_answer_ends_where_the_model_cannot_write_what_must_come(
    store: Store, tmp_path: Path
) -> None:
    async def ask(client: AsyncOpenAI) -> str | None:
        made = await client.chat.completions.create(model="m", messages=ASK, response_format=FORM)
        return made.choices[0].message.content

    # the name of a property must follow, and there is no quotation mark
    assert served(store, tmp_path, speaking(alphabet="{}0123456789+="), ask) == "{"


def test_a_tool_is_called_as_tool_choice_says(store: Store, tmp_path: Path) -> None:
    async def ask(client: AsyncOpenAI) -> None:
        make: Any = client.chat.completions.create
        named = {"type": "function", "function": {"name": "erase"}}
        for choice, possible in (("required", {"paint", "erase"}), (named, {"erase"})):
            made = await make(model="m", messages=ASK, tools=TOOLS, tool_choice=choice, n=3, seed=1)
            for one in made.choices:
                assert one.finish_reason == "tool_calls"
                [call] = one.message.tool_calls
                assert call.function.name in possible
                assert set(json.loads(call.function.arguments)) == {"color", "is_new"}
        made = await make(model="m", messages=ASK, tools=TOOLS, tool_choice="none", max_tokens=5)
        assert made.choices[0].message.tool_calls is None
        unknown = {"type": "function", "function": {"name": "eras"}}
        with pytest.raises(openai.BadRequestError, match="did you mean `erase`") as error:
            await make(model="m", messages=ASK, tools=TOOLS, tool_choice=unknown)
        assert error.value.param == "tool_choice"

    served(store, tmp_path, with_tools(), ask)
    rows = check_rows(store)
    said = [json.loads(row["sampling"] or "{}").get("forced_tools") for row in rows]
    assert said == [["paint", "erase"]] * 3 + [["erase"]] * 3 + [None]


def test_biases_decide_what_is_sampled_and_no_log_prob(store: Store, tmp_path: Path) -> None:
    token = tiny(**SPEC)[1].convert_tokens_to_ids("z")

    async def ask(client: AsyncOpenAI) -> str:
        made = await client.chat.completions.create(
            model="m", messages=ASK, max_tokens=6, logit_bias={str(token): 100}
        )
        with pytest.raises(openai.BadRequestError, match="names the token 9999") as error:
            await client.chat.completions.create(model="m", messages=ASK, logit_bias={"9999": 1})
        assert error.value.param == "logit_bias"
        return made.choices[0].message.content or ""

    assert served(store, tmp_path, policy(), ask) == "zzzzzz"
    [row] = check_rows(store)
    assert json.loads(row["sampling"]) == {"logit_bias": [[token, 100.0]]}

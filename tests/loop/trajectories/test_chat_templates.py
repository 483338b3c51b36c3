"""Conversations through real chat templates: what was sampled stays, token for token."""

import asyncio
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_templates import merging
from support.tiny_models import tiny

from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.chat_template import Templates
from rlake.loop.inference.policy import Completion, PolicyError, Segment, Turn
from rlake.loop.inference.transformers_engine.engine import TransformersEngine
from rlake.loop.models.load import prompt_ids, response_ids
from rlake.loop.models.tool_calls import assistant_message
from rlake.loop.trajectories.trajectory import to_experiences
from rlake.store import Experience, Task

tokenizer_of = cache(merging)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
FORMATS = {"llama3": "llama", "mistral": "mistral"}


class Talk:
    """A conversation whose answers are given as tokens, as an engine would sample them."""

    def __init__(
        self, name: str, *asked: str, tools: Sequence[dict[str, Any]] | None = None
    ) -> None:
        self.tokenizer, self.tools = tokenizer_of(name), tools
        self.format = FORMATS.get(name, "hermes")
        self.templates = Templates(self.tokenizer, tool_call_format=self.format)
        self.turns: list[Turn] = []
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": a} for a in asked]

    def answers(self, token_ids: Sequence[int]) -> list[int]:
        """Take sampled tokens as the next answer; return what was asked."""
        prompt = self.templates.prompt(self.messages, self.tools, self.turns)
        number = len(self.turns)
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        ended = list(token_ids[-1:]) == [self.tokenizer.eos_token_id]
        marked = self.tokenizer.decode(list(token_ids[:-1] if ended else token_ids))
        read = marked if self.tools else text
        completion = Completion(
            text=str(text),
            finish_reason="stop",
            message=assistant_message(str(read), self.tools, tool_call_format=self.format),
            prompt_ids=prompt,
            token_ids=list(token_ids),
            logprobs=[-1.0 - number - 0.001 * i for i in range(len(token_ids))],
            segments=[Segment(policy_version=number // 2, num_tokens=len(token_ids))],
            policy_version=number // 2,
        )
        turn = Turn(messages=list(self.messages), completion=completion, tools=self.tools)
        self.turns.append(turn)
        self.messages.append(completion.answer)
        return prompt

    def says(self, text: str) -> list[int]:
        """Take a text as the next answer, a token for each character."""
        vocabulary = self.tokenizer.get_vocab()
        return self.answers([*(vocabulary[c] for c in text), int(self.tokenizer.eos_token_id)])  # type: ignore[arg-type]

    def told(self, content: str, role: str = "user") -> None:
        self.messages.append({"role": role, "content": content})

    def rows(self) -> list[Experience]:
        return to_experiences(Task.ask("?"), self.turns)


CONTINUING = ["qwen2.5", "qwen3", "llama3", "mistral", "gemma", "gemma with another end"]


@pytest.mark.parametrize("name", CONTINUING)
def test_tokens_that_would_be_others_when_tokenized_again_stay_as_they_were(name: str) -> None:
    talk = Talk(name, "say hello")
    talk.says("hello 42")
    talk.told("again")
    asked = talk.says("hello")
    first = talk.turns[0].completion
    assert first.prompt_ids is not None
    assert first.token_ids is not None
    assert asked[: len(first.prompt_ids)] == first.prompt_ids
    assert asked[len(first.prompt_ids) :][: len(first.token_ids)] == first.token_ids
    assert list(first.token_ids) != response_ids(talk.tokenizer, "hello 42")
    [row] = talk.rows()
    assert row.num_turns == 2
    assert sum(row.loss_mask or ()) == sum(len(t.completion.token_ids or ()) for t in talk.turns)


@pytest.mark.parametrize("name", [n for n in CONTINUING if n != "gemma with another end"])
def test_a_continued_prompt_says_what_the_template_says(name: str) -> None:
    talk = Talk(name, "say hello")
    talk.says("hello")
    talk.told("and then")
    asked = talk.says("x")
    fresh = prompt_ids(talk.tokenizer, talk.turns[1].messages)
    assert asked != fresh
    assert talk.tokenizer.decode(asked) == talk.tokenizer.decode(fresh)


def test_an_end_token_that_the_template_does_not_write_stays_before_what_it_writes() -> None:
    talk = Talk("gemma with another end", "say hello")
    talk.says("hello")
    talk.told("again")
    assert "hello<eos><end_of_turn>\n<start_of_turn>user\nagain" in str(
        talk.tokenizer.decode(talk.says("x"))
    )


@pytest.mark.parametrize("name", CONTINUING)
def test_an_answer_that_was_cut_is_closed_by_the_template(name: str) -> None:
    talk = Talk(name, "count")
    vocabulary = talk.tokenizer.get_vocab()
    talk.answers([vocabulary[c] for c in "1 2 3"])
    talk.told("on")
    asked = talk.tokenizer.decode(talk.says("4"))
    assert asked == talk.tokenizer.decode(prompt_ids(talk.tokenizer, talk.turns[1].messages))
    assert len(talk.rows()) == 1


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_blanks_that_the_template_trims_stay_as_they_were_sampled(name: str) -> None:
    talk = Talk(name, "say hello")
    talk.says("  hello \n")
    talk.told("again")
    assert "  hello \n" in str(talk.tokenizer.decode(talk.says("x")))
    assert len(talk.rows()) == 1


def test_thoughts_that_the_template_strips_begin_another_row_that_nobody_tokenized_again() -> None:
    talk = Talk("qwen3", "say hello")
    talk.says("<think>\nhello?\n</think>\n\nhello")
    talk.told("again")
    asked = talk.says("<think>\nmore\n</think>\n\nhello")
    assert "hello?" not in str(talk.tokenizer.decode(asked))
    rows = talk.rows()
    assert [row.num_turns for row in rows] == [1, 1]
    for row, turn in zip(rows, talk.turns, strict=True):
        assert row.token_ids is not None
        sampled = list(turn.completion.token_ids or ())
        assert list(row.token_ids[-len(sampled) :]) == sampled
        assert sum(row.loss_mask or ()) == len(sampled)


def test_thoughts_stay_while_tools_answer_and_the_row_goes_on() -> None:
    talk = Talk("qwen3", "2+40?", tools=TOOLS)
    call = '<tool_call>\n{"name":"add","arguments":{"a":2,  "b":40}}\n</tool_call>'
    talk.says(f"<think>\nhm\n</think>\n\n{call}")
    talk.told("42", role="tool")
    talk.says("<think>\nok\n</think>\n\n42")
    assert [row.num_turns for row in talk.rows()] == [2]


CALLS = {
    "qwen2.5": '<tool_call>{"name":"add","arguments":{"a":  2}}</tool_call>',
    "qwen3": 'now:\n<tool_call>{"name":"add","arguments":{"a":  2}}</tool_call>',
    "llama3": '{"name":"add","parameters":{"a":  2}}',
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_the_template_writes_anew_stays_as_it_was_sampled(name: str) -> None:
    talk = Talk(name, "2+40?", tools=TOOLS)
    talk.says(CALLS[name])
    assert talk.messages[-1]["tool_calls"][0]["function"]["arguments"] == '{"a": 2}'
    talk.told("42", role="tool")
    assert CALLS[name] in str(talk.tokenizer.decode(talk.says("42")))
    assert len(talk.rows()) == 1


def test_calls_behind_a_special_token_are_read_and_stay() -> None:
    talk = Talk("mistral", "2+40?", tools=TOOLS)
    vocabulary = talk.tokenizer.get_vocab()
    text = '[{"name":"add","arguments":{"a":2}}]'
    talk.answers([vocabulary[c] for c in ("[TOOL_CALLS]", *text, "</s>")])
    assert talk.messages[-1]["tool_calls"][0]["function"]["name"] == "add"
    talk.told("42", role="tool")
    assert f"[TOOL_CALLS]{text}</s>[TOOL_RESULTS]42" in str(talk.tokenizer.decode(talk.says("x")))
    assert len(talk.rows()) == 1


def test_a_call_that_cannot_be_read_is_written_as_text() -> None:
    talk = Talk("qwen2.5", "2+40?", tools=TOOLS)
    talk.says("<tool_call>{oh</tool_call>")
    talk.told("Error: no JSON")
    assert "<tool_call>{oh</tool_call>" in str(talk.tokenizer.decode(talk.says("x")))
    assert len(talk.rows()) == 1


def test_sub_agents_are_rows_of_their_own_and_the_main_talk_goes_on() -> None:
    talk = Talk("qwen2.5", "plan")
    talk.says("first")
    main = list(talk.messages)
    talk.messages = [{"role": "user", "content": "sub task"}]
    talk.says("hello")
    talk.messages = [*main, {"role": "user", "content": "sub says hello"}]
    talk.says("done")
    rows = talk.rows()
    assert [(r.num_turns, r.prompt_text, r.response_text) for r in rows] == [
        (1, "sub task", "hello"),
        (2, "plan", "done"),
    ]


def test_two_answers_to_one_question_are_two_rows_of_which_one_goes_on() -> None:
    talk = Talk("qwen2.5", "say hello")
    asked = list(talk.messages)
    talk.says("hello")
    other, talk.messages = list(talk.messages), asked
    talk.says("hell")
    talk.messages = [*other, {"role": "user", "content": "again"}]
    talk.says("x")
    assert [(r.num_turns, r.response_text) for r in talk.rows()] == [(1, "hell"), (2, "x")]


def test_an_answer_that_is_begun_goes_on_where_it_was_cut() -> None:
    talk = Talk("qwen2.5", "think")
    vocabulary = talk.tokenizer.get_vocab()
    talk.answers([vocabulary[c] for c in "hello"])
    talk.messages[-1] = {"role": "assistant", "content": "hello, so: "}
    asked = talk.says("42")
    first = talk.turns[0].completion
    assert first.prompt_ids is not None
    assert asked[: len(first.prompt_ids) + 5] == [*first.prompt_ids, *(first.token_ids or ())]
    assert str(talk.tokenizer.decode(asked)).endswith("assistant\nhello, so: ")
    [row] = talk.rows()
    assert (row.response_text, row.num_turns) == ("hello, so: 42", 1)
    assert row.messages == [
        {"role": "user", "content": "think"},
        {"role": "assistant", "content": "hello, so: 42"},
    ]
    assert sum(row.loss_mask or ()) == 5 + 3


async def ask(name: str, *messages: dict[str, Any]) -> None:
    model, _ = tiny()
    await ChatPolicy(TransformersEngine(model, tokenizer_of(name))).generate(messages)


def test_a_template_that_refuses_is_an_error_with_its_reason() -> None:
    for name, role in (("raises", "user"), ("gemma", "system"), ("mistral", "system")):
        with pytest.raises(PolicyError, match="the chat template refuses") as caught:
            asyncio.run(ask(name, {"role": role, "content": "?"}))
        assert caught.value.finish_reason == "template_error"


texts = st.text("hello 42", min_size=1, max_size=8)
sampled = st.lists(st.integers(2, 107), min_size=1, max_size=6)


@settings(max_examples=60)
@given(
    name=st.sampled_from(CONTINUING),
    talks=st.lists(st.tuples(texts, sampled, st.booleans()), min_size=1, max_size=4),
)
def test_rows_hold_all_that_was_sampled_and_every_column_is_aligned(
    name: str, talks: list[tuple[str, list[int], bool]]
) -> None:
    talk = Talk(name)
    for text, ids, is_ended in talks:
        talk.told(text)
        talk.answers([*ids, int(talk.tokenizer.eos_token_id)] if is_ended else ids)  # type: ignore[arg-type]
    rows = talk.rows()
    left = list(talk.turns)
    for row in rows:
        assert row.token_ids is not None
        assert row.loss_mask is not None
        assert row.logprobs is not None
        assert len(row.token_ids) == len(row.loss_mask) == len(row.logprobs)
        columns = list(zip(row.token_ids, row.loss_mask, row.logprobs, strict=True))
        assert all(p == 0.0 for _, is_sampled, p in columns if not is_sampled)
        assert row.prompt_length == row.loss_mask.index(True)
        own, left = left[: row.num_turns], left[row.num_turns or 0 :]
        kept = [(i, p) for i, is_sampled, p in columns if is_sampled]
        said = [t.completion for t in own]
        assert kept == [
            (i, p) for c in said for i, p in zip(c.token_ids or (), c.logprobs or (), strict=True)
        ]
        assert sum(s["num_tokens"] for s in row.segments or ()) == sum(row.loss_mask)
        versions = [s["policy_version"] for s in row.segments or ()]
        assert all(a < b for a, b in pairwise(versions))
        last = own[-1].completion
        assert list(row.token_ids) == [*(last.prompt_ids or ()), *(last.token_ids or ())]
    assert not left


@pytest.mark.parametrize(
    ("changes", "rows"),
    [({"tool_calls": None, "refusal": None}, ["x"]), ({"content": "goodbye"}, ["hello", "x"])],
)
def test_a_message_without_its_empty_keys_goes_on_and_a_changed_one_begins_another_row(
    changes: dict[str, Any], rows: list[str]
) -> None:
    talk = Talk("qwen2.5", "say hello")
    talk.says("hello")
    talk.messages[-1] = {**talk.messages[-1], **changes}
    talk.told("again")
    talk.says("x")
    assert [r.response_text for r in talk.rows()] == rows

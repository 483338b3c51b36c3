"""Rows of text get their tokens when they are drawn; rows of tokens are left as they are."""

import asyncio
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import polars as pl
import pytest
from support.builders import experiences, rows
from support.chat_templates import merging
from support.tiny_models import tiny, written
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.policy import Sampling
from rlake.loop.inference.transformers_engine.engine import TransformersEngine
from rlake.loop.models.chat_tokenizer import ConversationTokenizer
from rlake.loop.models.load import prompt_ids, response_ids, tokenizer_digest
from rlake.loop.trainer.row_tokens import tokenize, with_media
from rlake.loop.trajectories.conversation import Conversation
from rlake.store import Experience, Task
from rlake.store.files import Tokens

_, TOKENIZER = tiny()
EOS = 1


def text_row(**columns: object) -> Experience:
    """One row of text, with the id `t`."""
    values = {"experience_id": "t", "reward": None, "response_text": None} | columns
    [row] = experiences(1, **values)  # type: ignore[arg-type]
    return row


def tokenized(*records: Experience) -> pl.DataFrame:
    return tokenize(rows(records), TOKENIZER)


def said(row: Experience, tokenizer: PreTrainedTokenizerFast = TOKENIZER) -> tuple[str, ...]:
    """What is read and what is trained on, in turns, decoded."""
    [found] = tokenize(rows([row]), tokenizer).to_dicts()
    pairs = zip(found["loss_mask"], found["token_ids"], strict=True)
    turns = [[t for _, t in turn] for _, turn in groupby(pairs, key=itemgetter(0))]
    assert not found["loss_mask"][0]
    return tuple(str(tokenizer.decode(turn)) for turn in turns)


def test_prompt_and_response_become_tokens_and_only_the_response_is_trained_on() -> None:
    row = text_row(prompt_text="1+2=", response_text="3")
    assert said(row) == ("1+2=", "3<eos>")
    [found] = tokenized(row).to_dicts()
    assert found["token_ids"] == [4, 13, 5, 14, 6, EOS]
    assert found["was_text"]


def test_each_assistant_turn_is_trained_on() -> None:
    messages = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "+5="},
        {"role": "assistant", "content": "7"},
    ]
    assert said(text_row(messages=messages)) == ("1+1=", "2<eos>", "+5=", "7<eos>")


def test_messages_without_an_answer_go_with_the_response_text() -> None:
    messages = [{"role": "user", "content": "1+1="}]
    assert said(text_row(messages=messages, response_text="2")) == ("1+1=", "2<eos>")


def test_messages_count_more_than_the_plain_texts_beside_them() -> None:
    messages = [{"role": "user", "content": "4="}, {"role": "assistant", "content": "4"}]
    row = text_row(messages=messages, prompt_text="9=", response_text="9")
    assert said(row) == ("4=", "4<eos>")


def test_a_row_of_text_gets_the_tokens_that_a_policy_is_asked_with() -> None:
    row = text_row(prompt_text="12+3=", response_text="15")
    [found] = tokenized(row).to_dicts()
    asked = prompt_ids(TOKENIZER, [{"role": "user", "content": "12+3="}])
    assert found["token_ids"] == asked + response_ids(TOKENIZER, "15")


def test_an_answer_of_nothing_trains_the_end_token() -> None:
    assert said(text_row(prompt_text="1", response_text="")) == ("1", "<eos>")


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt_text": "1+1="},
        {"messages": [{"role": "user", "content": "1"}]},
        {"messages": [{"role": "assistant", "content": None}]},
    ],
)
def test_a_row_without_a_response_stays_without_tokens(columns: dict[str, object]) -> None:
    [found] = tokenized(text_row(**columns)).to_dicts()
    assert (found["token_ids"], found["loss_mask"]) == (None, None)


@pytest.mark.parametrize("messages", ["no json [", '"text"', "[1]", '[{"role": "assistant"', "{}"])
def test_a_row_whose_messages_are_broken_stays_without_tokens_and_the_others_go_on(
    messages: str,
) -> None:
    good = text_row(experience_id="a", prompt_text="1", response_text="2")
    frame = rows([good, text_row(experience_id="b")]).with_columns(
        messages=pl.when(pl.col("experience_id") == "b").then(pl.lit(messages))
    )
    found = tokenize(frame, TOKENIZER)
    assert found["token_ids"].to_list() == [[4, 5, EOS], None]
    assert found["loss_mask"].to_list() == [[False, True, True], None]
    assert found["was_text"].to_list() == [True, True]


def test_a_row_that_the_chat_template_refuses_stays_without_tokens() -> None:
    _, strict = tiny()
    strict.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('no system role') }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    asked = [{"role": "user", "content": "1"}]
    told = [{"role": "system", "content": "1"}, *asked]
    frame = rows(
        text_row(experience_id=name, messages=messages, response_text="2")
        for name, messages in (("a", told), ("b", asked))
    )
    assert tokenize(frame, strict)["token_ids"].to_list() == [None, [4, 5, EOS]]


def test_a_character_that_is_not_in_the_vocabulary_becomes_one_unknown_token() -> None:
    [found] = tokenized(text_row(prompt_text="1é2", response_text="?\n")).to_dicts()
    assert found["token_ids"] == [4, 2, 5, 2, 2, EOS]


def test_rows_of_tokens_are_never_tokenized_again() -> None:
    before = rows(written(3, prompt_text="1+1=", response_text="9"))
    after = tokenize(before, TOKENIZER)
    assert after.drop("was_text").equals(before)
    assert after["was_text"].to_list() == [False] * 3


def test_text_and_tokens_together_keep_their_order() -> None:
    made = [
        row
        for i, row in enumerate(written(12))
        for row in (
            row,
            text_row(experience_id=f"z{12 - i}", prompt_text=f"{i}=", response_text="1"),
        )
    ]
    found = tokenized(*made)
    assert found["experience_id"].to_list() == [r.experience_id for r in made]
    assert found["was_text"].to_list() == [False, True] * 12
    own = found.filter(~pl.col("was_text"))
    assert own["token_ids"].to_list() == [list(r.token_ids or ()) for r in written(12)]
    texts = found.filter("was_text")["token_ids"].to_list()
    assert [TOKENIZER.decode(t) for t in texts] == [f"{i}=1<eos>" for i in range(12)]


def test_a_frame_of_tokens_alone_and_one_of_text_have_the_same_types() -> None:
    tokens = tokenized(*written(1)).schema
    texts = tokenized(text_row(prompt_text="1", response_text="1")).schema
    assert tokens == texts


def test_another_vocabulary_or_template_is_another_digest() -> None:
    _, same = tiny(seed=5)
    _, other = tiny(alphabet="0123456789+=?")
    assert tokenizer_digest(same) == tokenizer_digest(TOKENIZER)
    assert tokenizer_digest(other) != tokenizer_digest(TOKENIZER)
    same.chat_template = "{{ messages[0]['content'] }}"
    assert tokenizer_digest(same) != tokenizer_digest(TOKENIZER)


def test_a_tokenizer_has_the_same_digest_after_it_was_used_stored_and_loaded(
    tmp_path: Path,
) -> None:
    _, used = tiny()
    used(["1", "1+1"], padding=True, truncation=True, max_length=2)
    assert tokenizer_digest(used) == tokenizer_digest(TOKENIZER)
    used.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_digest(loaded) == tokenizer_digest(TOKENIZER)


CALL = {"id": "c00000001", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
TRAJECTORY = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "c00000002"}]},
    {"role": "tool", "tool_call_id": "c00000001", "content": "4"},
    {"role": "tool", "tool_call_id": "c00000002", "content": "4"},
]
WRITTEN = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


@pytest.mark.parametrize("end", ["tool", "user", "assistant"])
def test_calls_of_a_trajectory_are_trained_on_wherever_it_ends(end: str) -> None:
    more = [{"role": "assistant", "content": "It is 4."}, {"role": "user", "content": "Thanks!"}]
    talk = TRAJECTORY + {"tool": [], "user": more, "assistant": more[:1]}[end]
    tools = [{"type": "function", "function": {"name": "add"}}]
    response = None if end == "tool" else "It is 4."
    row = text_row(messages=talk, tools=tools, response_text=response)
    first, *turns = said(row, merging("qwen2.5"))
    assert '"name": "add"' in first, "tools that were offered are in the prompt"
    assert turns[0] == f"{WRITTEN}\n{WRITTEN}<|im_end|>"
    assert turns[2:3] == ([] if end == "tool" else ["It is 4.<|im_end|>"])
    assert len(turns) == {"tool": 2, "user": 4, "assistant": 3}[end]


def test_older_calls_of_functions_and_parts_of_text_are_trained_on() -> None:
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "4."}]
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
        {"role": "assistant", "function_call": {"name": "add", "arguments": {"a": 2}}},
        {"role": "function", "name": "add", "content": "4"},
        {"role": "assistant", "content": parts},
    ]
    turns = said(text_row(messages=talk), merging("qwen2.5"))
    assert turns[0].endswith("user\n2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert turns[1] == f"{WRITTEN}<|im_end|>"
    assert turns[3] == "It is 4.<|im_end|>"
    image = [{"role": "user", "content": [{"type": "image_url"}]}, talk[-1]]
    assert tokenize(rows([text_row(messages=image)]), merging("qwen2.5"))["token_ids"][0] is None


def test_without_a_template_a_policy_is_asked_with_the_text_of_parts() -> None:
    _, bare = tiny()
    bare.chat_template = None
    parts = [{"type": "text", "text": "2+"}, {"type": "image_url"}, {"type": "text", "text": "2="}]
    talk = [{"role": "system", "content": None}, {"role": "user", "content": parts}]
    assert prompt_ids(bare, talk) == prompt_ids(bare, [{"role": "user", "content": "2+2="}])
    assert bare.decode(prompt_ids(bare, talk), skip_special_tokens=True) == "2+2="


def test_turns_that_the_template_writes_anew_are_trained_on_as_it_writes_them() -> None:
    talk = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "<think>\nsay 1\n</think>\n\none"},
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "<think>\n\n</think>\n\ntwo"},
    ]
    _, first, between, last = said(text_row(messages=talk), merging("qwen3"))
    assert (first, last) == ("one<|im_end|>", "<think>\n\n</think>\n\ntwo<|im_end|>")
    assert between == "\n<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n"


def test_of_a_pair_only_what_differs_is_trained_on() -> None:
    begin = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "+5="},
    ]
    made = [
        text_row(experience_id=name, messages=[*begin, {"role": "assistant", "content": text}])
        for name, text in (("a", "7"), ("b", "78"), ("c", ""))
    ]
    pairs = rows([made[0], made[1], made[2], made[0]])
    found = tokenize(pairs, TOKENIZER, are_pairs=True)
    trained = [sum(mask) for mask in found["loss_mask"]]
    assert trained == [2, 3, 1, 2], "an empty answer is its end, and one may begin the other"
    assert found.columns == tokenize(pairs, TOKENIZER).columns
    other = text_row(experience_id="d", messages=[begin[0], {"role": "assistant", "content": "3"}])
    [whole, _] = tokenize(rows([made[0], other]), TOKENIZER, are_pairs=True)["loss_mask"]
    assert sum(whole) == 4, "the same row in a pair that parts earlier"


BOS = 15
"""The token behind the alphabet of the tiny tokenizer."""


def beginning(single: str, *, template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer that puts tokens of its own around a text, as those of Llama do."""
    _, made = tiny()
    made.add_special_tokens({"bos_token": "<s>"})
    special = [("<s>", BOS), ("<eos>", EOS)]
    rule = TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=special)
    made.backend_tokenizer.post_processor = rule
    made.chat_template = template
    return made


@pytest.mark.parametrize("single", ["<s> $A", "<s> $A <eos>"])
def test_prompts_and_documents_begin_with_the_token_that_the_tokenizer_adds_by_itself(
    single: str,
) -> None:
    tokenizer = beginning(single)
    asked = [{"role": "user", "content": "1+2="}]
    assert tokenizer("1+2=")["input_ids"][:5] == [BOS, 4, 13, 5, 14]
    assert prompt_ids(tokenizer, asked) == [BOS, 4, 13, 5, 14]
    said = {"prompt_text": "1+2=", "response_text": "3"}
    [row] = tokenize(rows([text_row(**said)]), tokenizer).to_dicts()
    assert row["token_ids"] == [BOS, 4, 13, 5, 14, 6, EOS]
    assert row["loss_mask"] == [False] * 5 + [True] * 2
    [text] = tokenize(rows([text_row(**said)]), tokenizer, documents=True).to_dicts()
    assert text["token_ids"] == [BOS, 4, 13, 5, 14, 6, EOS]
    talk = [*asked, {"role": "assistant", "content": "3"}]
    found = ConversationTokenizer(tokenizer)(talk, None)
    assert isinstance(found, Tokens)
    assert list(found.token_ids) == [BOS, 4, 13, 5, 14, 6, EOS]


def test_no_token_stands_twice_at_the_beginning() -> None:
    plain = beginning("<s> $A <eos>")
    assert prompt_ids(plain, [{"role": "user", "content": "<s>1="}]) == [BOS, 4, 14]
    assert prompt_ids(plain, [{"role": "user", "content": ""}]) == [BOS]
    writes = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    asked = [{"role": "user", "content": "1="}]
    assert prompt_ids(beginning("<s> $A <eos>", template=writes), asked) == [BOS, 4, 14]
    only = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert prompt_ids(beginning("<s> $A", template=only), asked) == [4, 14], "the template decides"


def test_a_tokenizer_that_only_ends_texts_begins_none() -> None:
    tokenizer = beginning("$A <eos>")
    assert prompt_ids(tokenizer, [{"role": "user", "content": "1="}]) == [4, 14]
    [text] = tokenize(rows([text_row(prompt_text="1")]), tokenizer, documents=True).to_dicts()
    assert text["token_ids"] == [4, EOS]


def test_a_policy_is_asked_with_the_token_that_begins_texts_and_a_second_turn_keeps_it() -> None:
    model, _ = tiny()
    model.resize_token_embeddings(BOS + 1)
    policy = ChatPolicy(
        TransformersEngine(model, beginning("<s> $A")), sampling=Sampling(max_tokens=2)
    )
    talk = Conversation(Task.ask("1+2="), policy)

    async def ask_twice() -> None:
        await talk.respond()
        talk.add("4=")
        await talk.respond()

    asyncio.run(ask_twice())
    [row] = talk.rows()
    assert list(row.token_ids or ())[:5] == [BOS, 4, 13, 5, 14]
    read = zip(row.token_ids or (), row.loss_mask or (), strict=True)
    assert [token for token, is_sampled in read if not is_sampled].count(BOS) == 1


@pytest.mark.parametrize("messages", [[None, None], [None, '[{"content": "a"}]'], []])
def test_rows_without_messages_show_no_image(messages: list[str | None]) -> None:
    rows = pl.DataFrame({"messages": messages, "token_ids": [[1]] * len(messages)})
    media, wrong = with_media(rows, None)
    assert media.to_list() == [[]] * len(messages)
    assert wrong.to_list() == [None] * len(messages)

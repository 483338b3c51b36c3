"""Thoughts in tags: apart from the content in messages, streams, rows and requests."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from support.tiny_models import SPEC

from rlake.loop.config import FrozenModel
from rlake.loop.inference.answers import AnswerReader
from rlake.loop.inference.build import load_policy
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.chat_template import Templates
from rlake.loop.inference.detokenizer import SpecialTokens
from rlake.loop.inference.endpoint.responses import completion
from rlake.loop.inference.policy import Completion, Segment, Timing, Turn
from rlake.loop.inference.policy import Sampling as Sampled
from rlake.loop.models.chat_tokenizer import ConversationTokenizer
from rlake.loop.models.load import character_tokenizer, ids_behind, prompt_ids
from rlake.loop.models.reasoning import (
    FORMATS,
    MarkedParts,
    ReasoningStream,
    is_open,
    marked,
    split_reasoning,
)
from rlake.store.errors import ConfigError

ALPHABET = "\n !\"'(),-./0123456789:<=>?[]_abcdefghijklmnopqrstuvwxyzDHIKNTA{}+"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""As Qwen3's, without its rule that only thoughts after the last question are written."""
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add"}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ANSWERS = {
    "closed": "<think>\nfirst 2 + 2\n\nso four\n</think>\n\nfour.",
    "without": "four, <think> is a tag",
    "cut": "<think>\nand then",
    "half a tag": "<thin ice>",
    "empty": "<think>\n\n</think>\n\nfour.",
    "blank before": "\n <think>two</think>four",
    "tag at the end": "<think>a </thin b</think>c",
}


def streamed(text: str, size: int, **how: Any) -> tuple[str, str, str]:
    """The marked text, the thought and the content that a stream of parts passes."""
    stream, parts = ReasoningStream("think", **how), MarkedParts()
    whole, found = "", {True: "", False: ""}
    for at in range(0, len(text), size):
        part = stream(text[at : at + size])
        whole += part
        for is_thought, passed in parts(part):
            found[is_thought] += passed
    return whole, found[True], found[False]


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("begun", [[], ["is_begun"]])
def test_what_is_streamed_in_any_parts_begins_the_whole_answer(
    name: str, begun: Sequence[str]
) -> None:
    text, is_begun = ANSWERS[name], bool(begun)
    thought, content = split_reasoning(text, "think", is_begun=is_begun)
    message = {"content": content, "reasoning_content": thought}
    for size in (1, 2, 3, 7, len(text)):
        whole, thought_so_far, content_so_far = streamed(text, size, is_begun=is_begun)
        assert marked(message).startswith(whole)
        assert (thought or "").startswith(thought_so_far)
        assert content.startswith(content_so_far)
        if "</think>" in text:  # nothing is held back after the tag
            assert content_so_far == content


def test_a_thought_is_what_stands_between_the_tags_of_the_format() -> None:
    for name, (begin, end) in FORMATS.items():
        assert split_reasoning(f"{begin}\na\n{end}\n\nb", name) == ("a", "b")
        assert split_reasoning(f"a{end}b", name, is_begun=True) == ("a", "b")
        assert split_reasoning(f"b {begin}a{end}", name) == (None, f"b {begin}a{end}")
    assert split_reasoning("<think>cut", "think") == ("cut", "")
    assert is_open("[assistant]<think>\n", "think")
    assert not is_open("[assistant]<think>\n\n</think>\n\n", "think")


def reader(*, tools: Any = None, prompt: str = "[assistant]", special: Sequence[str] = ()) -> Any:
    tokenizer = character_tokenizer(ALPHABET, special=special, template=TEMPLATE)
    made = AnswerReader(
        tokenizer,
        SpecialTokens(tokenizer),
        tools=tools,
        tool_call_format="hermes",
        reasoning_format="think",
        prompt=ids_behind(tokenizer, prompt),
    )
    return tokenizer, made


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("call", ["", CALL])
def test_a_message_has_thought_content_and_calls_apart_and_streams_so(
    special: Sequence[str], tools: Any, call: str
) -> None:
    tokenizer, reads = reader(tools=tools, special=special)
    text = f"<think>\nadd <tool_call> maybe\n</think>\n\nso: {call}"
    ids = [*ids_behind(tokenizer, text), tokenizer.eos_token_id]
    message = reads.message(ids)
    assert message["reasoning_content"] == "add <tool_call> maybe"
    if tools and call:
        assert message["content"] == "so:"
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    else:
        assert message["content"] == f"so: {call}"
    decoder, whole = reads.decoder(), ""
    for token in ids:
        whole += decoder([token])
    assert marked(message).startswith(whole)
    assert "so:" in whole


def test_a_thought_that_the_template_begins_has_only_its_end() -> None:
    tokenizer, reads = reader(prompt="[user]2+2[assistant]<think>\n")
    message = reads.message(ids_behind(tokenizer, "easy\n</think>\n\n4"))
    assert message == {"role": "assistant", "content": "4", "reasoning_content": "easy"}
    tokenizer, reads = reader(prompt="[assistant]<think>\n\n</think>\n\n")
    assert reads.message(ids_behind(tokenizer, "4"))["content"] == "4"


def turn(text: str, tokenizer: Any, **message: Any) -> Turn:
    asked = [{"role": "user", "content": "two"}]
    answer = {"role": "assistant", **message}
    made = Completion(
        text=text,
        finish_reason="stop",
        message=answer,
        prompt_ids=prompt_ids(tokenizer, asked),
        token_ids=[*ids_behind(tokenizer, text), tokenizer.eos_token_id],
        logprobs=None,
        segments=[Segment(policy_version=0, num_tokens=1)],
        sampling=Sampled(),
        timing=Timing(),
    )
    return Turn(messages=asked, completion=made)


@pytest.mark.parametrize("blanks", ["\n", "", "\n\n "])
def test_tokens_of_a_thought_stay_in_the_next_prompt_as_they_were_sampled(blanks: str) -> None:
    tokenizer = character_tokenizer(ALPHABET, template=TEMPLATE)
    text = f"<think>{blanks}so{blanks}</think>{blanks}4"
    first = turn(text, tokenizer, content="4", reasoning_content="so")
    answer = first.completion.answer
    asked = [*first.messages, answer, {"role": "user", "content": "and"}]
    templates = Templates(tokenizer, reasoning_format="think")
    prompt = templates.continued(asked, None, [first])
    done = [*(first.completion.prompt_ids or ()), *(first.completion.token_ids or ())]
    assert prompt is not None
    assert prompt[: len(done)] == done
    assert tokenizer.decode(prompt[len(done) :]) == "[user]and[assistant]"
    other = [*first.messages, {**answer, "reasoning_content": "no"}, asked[-1]]
    assert templates.continued(other, None, [first]) is None


def test_a_stored_conversation_is_trained_on_with_its_last_thought() -> None:
    tokenizer = character_tokenizer(ALPHABET, template=TEMPLATE)
    said = [
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "4", "reasoning_content": "so"},
    ]
    made = ConversationTokenizer(tokenizer)(said, None)
    assert not isinstance(made, str)
    trained = [t for t, own in zip(made.token_ids, made.loss_mask, strict=True) if own]
    assert tokenizer.decode(trained) == "<think>\nso\n</think>\n\n4<eos>"


def test_an_endpoints_thought_is_read_by_either_name_or_from_its_content() -> None:
    def read(**message: Any) -> dict[str, Any]:
        body = json.dumps({"choices": [{"message": message}]}).encode()
        how = {"engine": "e", "keeps_logprobs": False, "reasoning_format": "think"}
        return dict(completion(body, timing=Timing(), **how).answer)

    expected = {"role": "assistant", "content": "4", "reasoning_content": "so"}
    assert read(content="4", reasoning_content="so") == expected
    assert read(content="4", reasoning="so") == expected
    assert read(content="<think>so</think>4") == expected
    assert read(content="4") == {"role": "assistant", "content": "4"}


def test_a_format_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="reasoning format `thinks` does not exist"):
        ChatPolicy(load_policy({"from_scratch": SPEC}).engine, reasoning_format="thinks")
    with pytest.raises(ValueError, match="'think', 'magistral' or 'seed_oss'"):
        FrozenModel.model_validate({"from_scratch": SPEC, "reasoning_format": "r1"})


def test_a_policy_separates_what_it_samples_after_a_begun_thought() -> None:
    # the tiny model's random answer is all thought: the template begins one, and nothing ends it
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    model = {"from_scratch": SPEC | {"alphabet": ALPHABET, "max_length": 96}}
    policy = load_policy(
        model | {"chat_template": template, "reasoning_format": "think"}, max_tokens=6
    )
    [one] = asyncio.run(policy.generate([{"role": "user", "content": "2"}]))
    assert one.answer["content"] == ""
    assert one.answer["reasoning_content"] == one.text.strip("\n")
    begun = [{"role": "user", "content": "2"}, {"role": "assistant", "content": "4"}]
    [more] = asyncio.run(policy.generate(begun))
    assert "reasoning_content" not in more.answer

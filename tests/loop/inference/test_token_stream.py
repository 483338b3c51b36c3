"""What is told of an answer while it is sampled: whole characters, and nothing of its calls."""

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest
from support.scripted_models import Parrot
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlake.loop.inference import Request, Sampled
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.detokenizer import IncrementalDetokenizer, SpecialTokens
from rlake.loop.inference.policy import PolicyError
from rlake.loop.inference.token_stream import TokenStream, streaming_to
from rlake.loop.models.tool_calls import FORMATS, OutsideToolCalls, assistant_message

TEXT = " naïve \u732b \U0001f600\U0001f600 e\u0301 Ω, done. "
TOOLS = [{"type": "function", "function": {"name": "add"}}]
ASKED = [{"role": "user", "content": "1+3="}]
CALL = '{"name": "add", "arguments": {"a": 1}}'


def of_bytes() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are single bytes, as those of rare characters in GPT-2's are."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, **{letter: i for i, letter in enumerate(letters, 1)}}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    raw.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")


def of_pieces() -> PreTrainedTokenizerFast:
    """A tokenizer of letters, with bytes where there are none, as Llama 2's."""
    words = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"adenov.,"]
    raw = Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")  # type: ignore[assignment]
    raw.decoder = decoders.Sequence(  # type: ignore[assignment]
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", unk_token="<unk>")


def telling(
    tokenizer: PreTrainedTokenizerFast,
) -> tuple[IncrementalDetokenizer, Callable[[Sequence[int]], str]]:
    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    marks = SpecialTokens(tokenizer)
    return IncrementalDetokenizer(text, special=marks.special, undecided=marks.bytes), text


@pytest.mark.parametrize("make", [of_bytes, of_pieces])
def test_text_is_told_token_by_token_and_never_a_part_of_a_character(
    make: Callable[[], PreTrainedTokenizerFast],
) -> None:
    tokenizer = make()
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    ids = [*ids[:4], 1 if make is of_pieces else 0, *ids[4:]]  # a special token says nothing
    speech, text = telling(tokenizer)
    parts = [speech([token]) for token in ids]
    whole = text(ids)
    assert "".join(parts) == whole
    assert whole.strip() == TEXT.strip()
    assert "\ufffd" not in "".join(parts)
    assert len([part for part in parts if part]) > 15
    speech, _ = telling(tokenizer)
    assert "".join(speech(ids[i : i + 3]) for i in range(0, len(ids), 3)) == whole


@pytest.mark.parametrize("make", [of_bytes, of_pieces])
def test_bytes_that_are_no_text_are_told_as_the_whole_says_them(
    make: Callable[[], PreTrainedTokenizerFast],
) -> None:
    tokenizer = make()
    draw = random.Random(0)
    for _ in range(200):
        ids = draw.choices(range(2, len(tokenizer)), k=draw.randrange(1, 30))
        speech, text = telling(tokenizer)
        assert text(ids).startswith("".join(speech([token]) for token in ids))


def test_a_token_costs_the_same_however_much_was_said_and_however_little_of_it_is_text() -> None:
    tokenizer = of_bytes()
    [byte] = tokenizer.convert_tokens_to_ids(["Ģ"])  # type: ignore[misc]
    [letter] = tokenizer.convert_tokens_to_ids(["a"])  # type: ignore[misc]
    for token in (byte, letter):
        looked_at = 0

        def text(ids: Sequence[int]) -> str:
            nonlocal looked_at
            looked_at += len(ids)
            return str(tokenizer.decode(list(ids)))

        speech = IncrementalDetokenizer(text)
        for _ in range(4000):
            speech([token])
        assert looked_at < 5 * 4000


ANSWERS = {
    "hermes": [
        f"Let me see. \n<tool_call>{CALL}</tool_call> so",
        f"<tool_call>{CALL}",
        "a < b <to",
    ],
    "mistral": [f" I add.[TOOL_CALLS][{CALL}]", "[TOOL_CALLS]add[ARGS]{}", "see [TOOL_"],
    "llama": [f"Now: <|python_tag|>{CALL}", CALL, f"\n{CALL}; {CALL}", "no [1] {2}", "`x` is"],
    "json": [f"```json\n{CALL}\n```", f" [{CALL}]", '{"answer": 4}', "``` no", "It is {4}."],
}


@pytest.mark.parametrize("tool_call_format", sorted(FORMATS))
def test_content_is_told_up_to_where_a_call_may_begin_however_it_is_cut(
    tool_call_format: str,
) -> None:
    draw = random.Random(0)
    for text in ANSWERS[tool_call_format]:
        message = assistant_message(text, TOOLS, tool_call_format=tool_call_format)
        for _ in range(40):
            beside, parts, at = OutsideToolCalls(tool_call_format), [], 0
            while at < len(text):
                size = draw.randrange(1, 6)
                parts.append(beside(text[at : at + size]))
                at += size
            told = "".join(parts)
            assert message["content"].startswith(told.lstrip() if "tool_calls" in message else told)
            assert not any(mark in told for mark in ("name", "TOOL", "<tool", "<|"))
    prose = OutsideToolCalls(tool_call_format)
    assert "".join(prose(letter) for letter in " It is 4, a < b. ") == " It is 4, a < b."


class Slowly(Parrot):
    """Lets others run between two tokens."""

    async def complete(self, requests: Sequence[Request]) -> list[Sampled]:
        made = []
        for request in requests:
            one = self._complete(Request(prompt_ids=(), sampling=request.sampling))
            for token in one.token_ids:
                assert request.on_tokens is not None
                request.on_tokens((token,))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            made.append(one)
        return made


def heard(*policies: ChatPolicy, tools: bool = False) -> tuple[list[str], list[str], TokenStream]:
    """Ask policies one after the other; return what was told, what is left, and who heard it."""

    async def ask() -> tuple[list[str], list[str], TokenStream]:
        listener, told = TokenStream(), []

        async def hear() -> None:
            while True:
                await listener.changed()
                told.extend(text for _, text in listener.take())

        hears = asyncio.create_task(hear())
        contents: list[str] = []
        with streaming_to(listener):
            for policy in policies:
                [one] = await policy.generate(ASKED, tools=TOOLS if tools else None)
                contents = [str(one.answer["content"])]
        try:
            left = listener.left(contents)
            await asyncio.sleep(0)
        finally:
            hears.cancel()
        return [*told, *(text for _, text in listener.take())], left, listener

    return asyncio.run(ask())


def test_a_policy_is_heard_token_by_token_and_what_its_calls_say_is_left_for_the_end() -> None:
    engine = Slowly([TEXT])
    engine.tokenizer = of_bytes()
    told, left, _ = heard(ChatPolicy(engine))
    assert ("".join(told), left) == (TEXT, [""])
    assert len(told) > 15
    told, left, _ = heard(
        ChatPolicy(Slowly([f"I add. <tool_call>{CALL}</tool_call> "])), tools=True
    )
    assert ("".join(told), left) == ("I add.", [""])
    told, left, _ = heard(ChatPolicy(Slowly(["I add."])), tools=True)
    assert ("".join(told), left) == ("I add.", [""])


def test_an_answer_that_is_sampled_again_goes_on_where_it_was_and_another_one_is_refused() -> None:
    broken, again = ChatPolicy(Slowly(["It is"])), ChatPolicy(Slowly(["It is 4."]))
    told, left, _ = heard(broken, again)
    assert ("".join(told), left) == ("It is 4.", [""])
    with pytest.raises(PolicyError, match="the answer differs from what was streamed"):
        heard(ChatPolicy(Slowly(["It is 5, or"])), ChatPolicy(Slowly(["It is 4."])))

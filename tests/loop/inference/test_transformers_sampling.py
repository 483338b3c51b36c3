"""Sampling against transformers' own, the trainer's log-probs, and the true distribution."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.tiny_models import tiny
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlake.loop.inference import Request, Sampled
from rlake.loop.inference.policy import Sampling
from rlake.loop.inference.transformers_engine.engine import TransformersEngine
from rlake.loop.models.token_logprobs import token_logprobs

PROMPTS = [[3, 4, 13, 5, 14], [7], [3, 13, 9, 9, 13, 4, 4, 14], [12, 12, 3]]


@pytest.fixture(scope="module")
def pair() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A model of two layers, so that its cache matters, whose weights nobody changes."""
    return tiny(layers=2, hidden_size=32, heads=4)


@pytest.fixture(scope="module")
def model(pair: tuple[PreTrainedModel, PreTrainedTokenizerFast]) -> PreTrainedModel:
    """Only the model."""
    return pair[0].eval()


def request(
    prompt: Sequence[int], max_tokens: int, temperature: float, seed: int, **rest: Any
) -> Request:
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed, **rest)
    return Request(prompt_ids=prompt, sampling=sampling)


def other(asked: Request, **changes: Any) -> Request:
    """Return a request that is sampled in another way."""
    return replace(asked, sampling=replace(asked.sampling, **changes))


def requests(*, max_tokens: int = 12, temperature: float = 1.0, seed: int = 0) -> list[Request]:
    return [request(p, max_tokens, temperature, seed + i) for i, p in enumerate(PROMPTS)]


def answer(
    model: PreTrainedModel, asked: list[Request], *, end: str | None = None
) -> list[Sampled]:
    _, tokenizer = tiny()
    if end is not None:
        tokenizer.add_special_tokens({"eos_token": end})
    return asyncio.run(TransformersEngine(model, tokenizer).complete(asked))


def test_greedy_answers_are_those_of_transformers_generate(model: PreTrainedModel) -> None:
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    made = model.generate(  # type: ignore[operator]
        ids, attention_mask=mask, do_sample=False, max_new_tokens=12, eos_token_id=1, pad_token_id=0
    )
    for got, row in zip(
        answer(model, requests(temperature=0)), made[:, longest:].tolist(), strict=True
    ):
        expected = row[: row.index(1) + 1] if 1 in row else row
        assert got.token_ids == expected
    assert len(set(map(tuple, made.tolist()))) > 1


@pytest.mark.parametrize("temperature", [0, 1.0, 0.6, 1.7])
def test_logprobs_are_those_of_a_full_forward_pass_at_1_where_the_temperature_is_0(
    model: PreTrainedModel, temperature: float
) -> None:
    asked = requests(temperature=temperature)
    for one, got in zip(asked, answer(model, asked), strict=True):
        row = torch.tensor([[*one.prompt_ids, *got.token_ids]])
        with torch.no_grad():
            expected = token_logprobs(model, row, temperature=temperature or 1.0)[0]
        assert got.logprobs == pytest.approx(expected[len(one.prompt_ids) :].tolist(), abs=1e-4)


def test_an_answer_does_not_depend_on_its_neighbours(model: PreTrainedModel) -> None:
    mixed = [
        other(r, max_tokens=5 + 9 * i, temperature=(0.0, 1.0, 0.7, 1.3)[i])
        for i, r in enumerate(requests())
    ]
    together = answer(model, mixed)
    for i, asked in enumerate(mixed):
        [alone] = answer(model, [asked])
        assert alone.token_ids == together[i].token_ids
        assert alone.logprobs == pytest.approx(together[i].logprobs, abs=1e-5)
    assert [s.token_ids for s in answer(model, mixed[::-1])] == [
        s.token_ids for s in together[::-1]
    ]


def test_a_prompt_that_occurs_several_times_is_answered_as_if_alone(model: PreTrainedModel) -> None:
    asked = [other(r, seed=10 * i + j) for i, r in enumerate(requests()) for j in range(3)]
    asked = asked[::2] + asked[1::2]
    together = answer(model, asked)
    for one, got in zip(asked, together, strict=True):
        assert answer(model, [one])[0].token_ids == got.token_ids


def test_sampling_leaves_the_global_random_state_alone(model: PreTrainedModel) -> None:
    before = torch.get_rng_state()
    answer(model, requests())
    assert torch.equal(before, torch.get_rng_state())


def test_an_answer_ends_with_its_end_token_also_at_the_limit(model: PreTrainedModel) -> None:
    asked = [request(PROMPTS[i % 4], 30, 1.3, i) for i in range(64)]
    got = answer(model, asked)
    for s in got:
        assert 1 not in s.token_ids[:-1]
        assert (s.token_ids[-1] == 1) == (s.finish_reason == "stop")
        assert len(s.token_ids) == len(s.logprobs) <= 30
    stopped = [(r, s.token_ids) for r, s in zip(asked, got, strict=True) if s.token_ids[-1] == 1]
    assert len(stopped) > 10
    one, tokens = next((r, ids) for r, ids in stopped if len(ids) > 1)
    [exact] = answer(model, [other(one, max_tokens=len(tokens))])
    [short] = answer(model, [other(one, max_tokens=len(tokens) - 1)])
    assert exact.finish_reason == "stop"
    assert (short.token_ids, short.finish_reason) == (tokens[:-1], "length")


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_answers_are_drawn_from_the_models_distribution(temperature: float) -> None:
    model, tokenizer = tiny(alphabet="ab", init_std=0.4)
    size, n = len(tokenizer), 6000
    got = answer(model.eval(), [request([3, 4], 2, temperature, i) for i in range(n)])
    seen = Counter(tuple(s.token_ids) for s in got)
    expected = true_distribution(model, [3, 4], size, temperature)
    assert sum(expected.values()) == pytest.approx(1, abs=1e-5)
    assert set(seen) <= set(expected)
    rare = {k for k, p in expected.items() if p * n < 5}  # too few for a chi-square: one cell
    cells = [(seen[k], p * n) for k, p in expected.items() if k not in rare]
    cells.append((sum(seen[k] for k in rare), max(sum(expected[k] for k in rare) * n, 1e-9)))
    cells = [c for c in cells if c[1] > 1e-6]
    assert len(cells) > 8
    chi_square = sum((o - e) ** 2 / e for o, e in cells)
    assert chance_of_more(chi_square, len(cells) - 1) > 1e-4


def true_distribution(
    model: PreTrainedModel, prompt: list[int], size: int, temperature: float
) -> dict[tuple[int, ...], float]:
    """Probabilities of all answers of two tokens, or of the end token alone."""
    chances: dict[tuple[int, ...], float] = {}
    with torch.no_grad():
        for first in range(size):
            rows = torch.tensor([[*prompt, first, second] for second in range(size)])
            logprobs = token_logprobs(model, rows, temperature=temperature)[:, len(prompt) :]
            for second in range(size):
                both = (first,) if first == 1 else (first, second)
                value = logprobs[second, 0] if first == 1 else logprobs[second].sum()
                chances[both] = float(value.exp())
    return chances


def chance_of_more(chi_square: float, freedom: int) -> float:
    half = torch.tensor([freedom / 2, chi_square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def test_only_the_likeliest_tokens_are_sampled_and_their_log_probs_are_of_all(
    model: PreTrainedModel,
) -> None:
    kinds: list[dict[str, Any]] = [
        {"top_k": 3},
        {"top_p": 0.6},
        {"top_k": 5, "top_p": 0.7},
        {"min_p": 0.3},
        {"min_p": 0.1, "top_k": 6, "top_p": 0.8},
        {},
    ]
    for kind in kinds:
        asked = [request(PROMPTS[i % 4], 6, 0.9, i, **kind) for i in range(24)]
        for one, got in zip(asked, answer(model, [*asked, *requests()])[:24], strict=True):
            row = torch.tensor([[*one.prompt_ids, *got.token_ids]])
            with torch.no_grad():
                found = torch.log_softmax(model(row).logits[0] / 0.9, -1)
            for token, logprob, all_V in zip(
                got.token_ids, got.logprobs, found[len(one.prompt_ids) - 1 :], strict=False
            ):
                assert token in nucleus(all_V.exp(), **kind)
                assert logprob == pytest.approx(float(all_V[token]), abs=1e-5)


def nucleus(
    p_V: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[int]:
    order = p_V.argsort(descending=True).tolist()[: top_k or None]
    order = [token for token in order if p_V[token] >= min_p * p_V.max()]
    total, kept, together = float(p_V[order].sum()), [], 0.0
    for token in order:
        if together >= top_p * total and kept:
            break
        kept.append(token)
        together += float(p_V[token])
    return kept


@pytest.mark.parametrize("kind", ["qwen3_sliding", "mistral", "llama_grouped", "gemma2"])
def test_models_with_windows_and_shared_heads_say_what_transformers_generate_says(
    kind: str,
) -> None:
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": 15, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    made = {
        "qwen3_sliding": lambda: transformers.Qwen3Config(
            **shape, use_sliding_window=True, sliding_window=4, max_window_layers=1
        ),
        "mistral": lambda: transformers.MistralConfig(**shape, sliding_window=5),
        "llama_grouped": lambda: transformers.LlamaConfig(**shape),
        "gemma2": lambda: transformers.Gemma2Config(
            **shape, sliding_window=4, query_pre_attn_scalar=8
        ),
    }[kind]()
    torch.manual_seed(0)
    ours = transformers.AutoModelForCausalLM.from_config(made).eval()
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        whole = ours.generate(ids, do_sample=False, max_new_tokens=14, pad_token_id=0)
        expected.append(whole[0, len(prompt) :].tolist())
    asked = [request(p, 14, 0.0, 0) for p in PROMPTS]
    got = answer(ours, asked, end="<end>")
    assert [list(one.token_ids) for one in got] == expected

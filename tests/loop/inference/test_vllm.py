"""The real vLLM: its answers, its weights, and how it dies."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import save_file
from support.processed_logits import END, changed
from support.tiny_models import config, table, tiny
from support.vllm_engines import PROMPT, SPEC, asks, furthest, in_a_loop, logprobs
from transformers import PreTrainedModel

from rlake.loop.algorithms import resolve
from rlake.loop.config import TrainerConfig
from rlake.loop.inference import Sampled, Weights
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.policy import PolicyError, Sampling
from rlake.loop.inference.vllm_engine.engine import VllmEngine
from rlake.loop.losses.batch import examples
from rlake.loop.models.state_dict import state_of, weights_digest
from rlake.loop.run import run
from rlake.loop.trainer.networks import Networks
from rlake.loop.trainer.step import Updater
from rlake.store import Store
from rlake.store.errors import ConfigError, JobError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm; `make .venv/.vllm`"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]


@pytest.fixture(scope="module")
def engine(versions: list[Weights]) -> Iterator[VllmEngine]:
    assert versions[0].folder is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        made = VllmEngine(versions[0].folder)
    asyncio.run(made.swap(versions[0]))
    yield made
    asyncio.run(made.close())


@in_a_loop
async def test_greedy_answers_and_log_probs_are_those_of_transformers(
    engine: VllmEngine, versions: list[Weights], models: list[PreTrainedModel]
):
    assert engine.max_length == 2048
    for weights in (versions[1], versions[0]):
        await engine.swap(weights)
        given, compared = engine.verified
        assert given == compared > 20  # every tensor was read back
        [greedy] = await engine.complete(asks(1, temperature=0.0))
        model = models[weights.version]
        assert logprobs(model, greedy.token_ids).argmax(-1).tolist() == list(greedy.token_ids)
        assert furthest([greedy], models) < 1e-3
        assert [s.digest for s in greedy.segments] == [weights.digest]
        assert 0 < greedy.timing.first_token <= greedy.timing.total


@in_a_loop
async def test_log_probs_are_of_the_full_distribution_and_on_policy_ratios_are_one(
    engine: VllmEngine, models: list[PreTrainedModel]
):
    cuts: list[dict[str, Any]] = [{}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.3}]
    cuts.append({"min_p": 0.05, "top_k": 5, "top_p": 0.8})
    settings = [{"temperature": t, **cut} for t in (0.7, 1.0, 1.3) for cut in cuts]
    updater = Updater(
        Networks(models[engine.version]), resolve("grpo"), TrainerConfig(), total_steps=1, pad_id=0
    )
    for how in settings:
        found = await engine.complete(asks(4, max_tokens=40, **how))
        assert furthest(found, models, how["temperature"]) < 1e-4
        assert all(kept(models[engine.version], one, **how) for one in found)
        rows = [
            {
                "experience_id": str(i),
                "token_ids": [*PROMPT, *one.token_ids],
                "loss_mask": [False] * len(PROMPT) + [True] * len(one.token_ids),
                "logprobs": [0.0] * len(PROMPT) + list(one.logprobs),
                "advantage": 1.0 - 2 * (i % 2),
                "weight": 1.0,
                "temperature": how["temperature"],
            }
            for i, one in enumerate(found)
        ]
        metrics = updater.evaluate([examples(pl.DataFrame(rows))])
        assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["clip_fraction"] == 0.0
        assert abs(metrics["kl"]) < 1e-6
    # in one batch, greedy ones among them
    requests = [asks(1, max_tokens=40, **how)[0] for how in [*settings, {"temperature": 0.0}]]
    for request, one in zip(requests, await engine.complete(requests), strict=True):
        assert furthest([one], models, request.sampling.temperature or 1.0) < 1e-4


@in_a_loop
async def test_penalties_and_least_lengths_change_what_is_sampled_and_no_log_prob(
    engine: VllmEngine, models: list[PreTrainedModel]
):
    hows: list[dict[str, Any]] = [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.5, "frequency_penalty": -0.4},
        {"min_tokens": 30, "logit_bias": ((END, 50.0),)},
        {"logit_bias": ((7, 4.0), (9, -3.5)), "top_p": 0.9},
    ]
    model = models[engine.version]
    requests = [asks(1, max_tokens=40, temperature=t, **h)[0] for h in hows for t in (0.0, 0.8)]
    plain = asks(2, max_tokens=40)
    found = await engine.complete([*requests, *plain])
    for request, one in zip([*requests, *plain], found, strict=True):
        assert furthest([one], models, request.sampling.temperature or 1.0) < 1e-4
        with torch.no_grad():  # repetition penalties tell positive logits from negative ones
            ids = torch.tensor([[*PROMPT, *one.token_ids]])
            raw_TV = model(input_ids=ids).logits[0, len(PROMPT) - 1 :].double().numpy()
        for i, token in enumerate(one.token_ids if request.sampling.temperature == 0 else ()):
            made = changed(raw_TV[i], PROMPT, list(one.token_ids[:i]), request.sampling)
            assert made[token] > made.max() - 1e-3
    assert {len(found[i].token_ids) for i in (4, 5)} == {31}
    [ignoring] = await engine.complete(
        asks(1, max_tokens=40, ignore_eos=True, logit_bias=((END, 50.0),))
    )
    assert list(ignoring.token_ids) == [END] * 40


@in_a_loop
async def test_a_grammar_is_followed_and_log_probs_are_without_it(
    engine: VllmEngine, models: list[PreTrainedModel], versions: list[Weights]
):
    # the tiny tokenizer has digits and signs only, with which JSON writes numbers
    policy = ChatPolicy(engine)
    how = Sampling(max_tokens=8, json_schema='{"enum": [1, 23, 45]}', top_logprobs=2)
    asked = [{"role": "user", "content": "1+1="}]
    sampled = policy.generate(asked, n=4, sampling=how)
    plain = policy.generate(asked, sampling=replace(how, json_schema=None))
    found, [free] = await asyncio.gather(sampled, plain)
    prompt = list(free.prompt_ids or ())
    for one in [*found, free]:
        tokens = list(one.token_ids or ())
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *tokens]])
            own_TV = models[engine.version](input_ids=ids).logits[0].double().log_softmax(-1)
        for i, token in enumerate(tokens):
            truth_V = own_TV[len(prompt) - 1 + i]
            assert one.logprobs is not None
            assert one.logprobs[i] == pytest.approx(float(truth_V[token]), abs=1e-4)
            assert one.top_logprobs is not None
            tops = [logprob for _, logprob in one.top_logprobs[i]]
            assert tops == pytest.approx(truth_V.topk(2).values.tolist(), abs=1e-4)
    assert {one.text for one in found} <= {"1", "23", "45"}
    # weights that arrive meanwhile: the answer begins anew, and follows the grammar from there
    long = Sampling(max_tokens=600, json_schema='{"type": "integer", "minimum": 1}', top_k=1)
    work = asyncio.create_task(policy.generate(asked, n=4, sampling=long))
    await engine.swap(versions[1 - engine.version])
    for one in await work:
        assert len(one.segments) == 1
        assert one.text.isdigit()


def kept(
    model: PreTrainedModel,
    sampled: Sampled,
    *,
    temperature: float,
    top_k: int = 99,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> bool:
    """Whether all tokens are among those that truncation leaves, but for rounding."""
    p_TV = logprobs(model, sampled.token_ids, temperature).exp()
    own_T = p_TV.gather(-1, torch.tensor(sampled.token_ids)[:, None])
    before_T = (p_TV * (p_TV > own_T)).sum(-1)
    is_first = before_T == 0
    share = own_T[:, 0] / p_TV.amax(-1)
    in_k, in_p = (p_TV > own_T).sum(-1) < top_k, before_T < top_p + 1e-3
    return bool((is_first | (in_k & in_p & (share > min_p - 1e-3))).all())


@in_a_loop
async def test_tokens_are_heard_as_they_come_while_they_are_sampled(
    engine: VllmEngine, versions: list[Weights]
):
    await engine.swap(versions[1])  # whose likeliest answer has no end
    parts: list[list[int]] = []
    begun, loop = asyncio.Event(), asyncio.get_running_loop()

    def hear(tokens: Sequence[int]) -> None:
        parts.append(list(tokens))
        loop.call_soon_threadsafe(begun.set)

    [asked] = asks(1, temperature=0.0, max_tokens=1000)
    [alone] = await engine.complete([asked])
    for _ in range(8):  # on a busy machine vLLM may be done before this one hears of it
        begun.clear()
        parts.clear()
        work = asyncio.create_task(engine.complete([replace(asked, on_tokens=hear)]))
        await asyncio.wait_for(begun.wait(), 60)
        was_done = work.done()
        [told] = await work
        assert [token for part in parts for token in part] == list(told.token_ids)
        assert told.token_ids == alone.token_ids
        if not was_done:
            assert len(parts) > 10, "several tokens come at once where it is busy, never all"
            return
    pytest.fail("none of them was heard before it ended")


@torch.inference_mode()
def likely(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """How likely given tokens are behind the prompt, by transformers."""
    return logprobs(model, token_ids).gather(-1, torch.tensor(token_ids)[:, None])[:, 0]


@in_a_loop
async def test_given_tokens_are_as_likely_as_transformers_says_also_while_weights_change(
    engine: VllmEngine, versions: list[Weights], models: list[PreTrainedModel]
):
    texts = [[3 + (i * k) % 12 for i in range(40 * k)] for k in range(1, 13)]
    await engine.swap(versions[1])
    for text, told in zip(texts, await scored(engine, texts), strict=True):
        assert torch.tensor(told).allclose(likely(models[1], text), atol=1e-3)
    work = asyncio.create_task(scored(engine, texts * 4))
    for weights in (versions[0], versions[1], versions[0]):
        await engine.swap(weights)
    found = [
        [torch.tensor(told).allclose(likely(model, text), atol=1e-3) for model in models]
        for text, told in zip(texts * 4, await work, strict=True)
    ]
    assert all(sum(of) == 1 for of in found), "each text is scored by one set of weights"
    assert len(await engine.score(PROMPT, [4] * (2047 - len(PROMPT)))) == 2047 - len(PROMPT)
    with pytest.raises(PolicyError, match="the model scores at most 2047 tokens, got 2048"):
        await engine.score(PROMPT, [4] * (2048 - len(PROMPT)))
    with pytest.raises(ConfigError, match=r"at temperature 1, not 0\.7"):
        await engine.score(PROMPT, [4], temperature=0.7)


async def scored(engine: VllmEngine, texts: Sequence[Sequence[int]]) -> list[list[float]]:
    return await asyncio.gather(*(engine.score(PROMPT, text) for text in texts))


@in_a_loop
async def test_equal_requests_have_equal_answers_and_a_text_ends_them(engine: VllmEngine):
    first, again = await engine.complete(asks(6)), await engine.complete(asks(6)[::-1])
    assert [s.token_ids for s in first] == [s.token_ids for s in again[::-1]]
    assert len({tuple(s.token_ids) for s in first}) > 1
    for stopped in await engine.complete(asks(6, stop=("1",))):
        text = str(engine.tokenizer.decode(list(stopped.token_ids)))
        assert text.find("1") in (-1, len(text) - 1)


@in_a_loop
async def test_each_token_is_of_the_weights_that_its_segment_names_through_many_swaps(
    engine: VllmEngine, versions: list[Weights], models: list[PreTrainedModel]
):
    swaps, sampled = 0, []
    heard: list[list[int]] = []
    while swaps < 20:
        told = [[] for _ in range(12)]
        requests = [
            replace(request, on_tokens=tokens.extend)
            for request, tokens in zip(asks(12), told, strict=True)
        ]
        heard += told
        work = asyncio.create_task(engine.complete(requests))
        while not work.done():
            await engine.swap(versions[(swaps + 1) % 2])
            swaps += 1
            await asyncio.wait({work}, timeout=0.05)
        sampled += await work
    assert any(len(one.segments) > 1 for one in sampled)
    assert heard == [list(one.token_ids) for one in sampled]
    assert furthest(sampled, models) < 1e-3
    known = {w.version: w.digest for w in versions}
    assert all(s.digest == known[s.policy_version] for one in sampled for s in one.segments)


@in_a_loop
async def test_weights_come_in_memory_and_wrong_ones_leave_the_old(
    engine: VllmEngine, versions: list[Weights], models: list[PreTrainedModel], tmp_path: Path
):
    state = state_of(models[1])
    digest = weights_digest(state)
    await engine.swap(Weights(version=1, digest=digest, state=state))
    [one] = await engine.complete(asks(1))
    assert furthest([one], models) < 1e-3
    damaged = Weights(version=2, digest="0" * 32, folder=versions[0].folder)
    with pytest.raises(JobError, match=r"has digest .* expected 0000"):
        await engine.swap(damaged)
    other, _ = tiny(**SPEC | {"layers": 1})
    save_file(state_of(other), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(JobError, match="belongs to another model"):
        await engine.swap(Weights(version=2, digest="?", folder=tmp_path))
    assert (engine.version, engine.digest) == (1, digest)
    assert furthest(await engine.complete(asks(1)), models) < 1e-3


@in_a_loop
async def test_requests_that_are_ended_are_answered_with_what_they_have(
    engine: VllmEngine, versions: list[Weights]
):
    await engine.swap(versions[1])  # whose likeliest answer has no end
    begun, loop = asyncio.Event(), asyncio.get_running_loop()

    def hear(tokens: Sequence[int]) -> None:
        loop.call_soon_threadsafe(begun.set)

    [long] = asks(1, temperature=0.0, max_tokens=2000)
    [short] = asks(1, temperature=0.0, max_tokens=20)
    for _ in range(8):  # on a busy machine vLLM may be done before it hears of it
        begun.clear()
        ended = replace(long, on_tokens=hear)
        work = asyncio.create_task(engine.complete([ended, short]))
        await asyncio.wait_for(begun.wait(), 60)
        engine.abort([ended])
        first, second = await work
        assert (len(second.token_ids), second.finish_reason) == (20, "length")
        assert 1 <= len(first.token_ids) == len(first.logprobs)
        assert list(first.token_ids)[:20] == list(second.token_ids)[: len(first.token_ids)]
        if first.finish_reason == "abort":
            assert len(first.token_ids) < 2000
            return
    pytest.fail("none of them was ended")


@in_a_loop
async def test_vllm_that_is_killed_fails_its_requests_and_starts_again(
    engine: VllmEngine, models: list[PreTrainedModel]
):
    # weights that came in memory: it starts again without a folder that has them
    state = state_of(models[1])
    await engine.swap(Weights(version=1, digest=weights_digest(state), state=state))
    before = engine.version
    work = asyncio.create_task(engine.complete(asks(64)))
    await asyncio.wait({work}, timeout=0.02)
    [core] = [p for p in multiprocessing.active_children() if p.name.startswith("EngineCore")]
    assert core.pid is not None
    os.kill(core.pid, signal.SIGKILL)
    with pytest.raises(PolicyError, match="died"):
        await work
    waits = asyncio.create_task(engine.complete(asks(1)))
    while engine.restarts == 0 and not waits.done():
        await asyncio.sleep(0.01)
    waits.cancel()  # a request that is cancelled does not cancel the restart for others
    sampled = await engine.complete(asks(2))
    assert engine.restarts == 1
    assert {s.policy_version for one in sampled for s in one.segments} == {before} == {1}
    assert furthest(sampled, models) < 1e-3


def test_a_run_learns_from_a_teacher_on_vllm_and_ends_it(
    store: Store, versions: list[Weights], models: list[PreTrainedModel]
):
    before = {child.pid for child in multiprocessing.active_children()}
    explorer = {
        "workflow": "on_policy_distillation",
        "auxiliary_models": {"teacher": {"path": str(versions[0].folder), "engine": "vllm"}},
        "sampling": {"max_tokens": 3},
    }
    # Another minute may pass on a busy machine until the teacher is loaded.
    schedule = {"timeout": 600}
    run(store, config(algorithm="on_policy_distillation", explorer=explorer, schedule=schedule))
    rows = table(store, "experiences", "token_ids, prompt_length, teacher_logprobs").rows()
    assert len(rows) >= 3 * 2
    for token_ids, prompt, told in rows:
        ids = torch.tensor([token_ids])
        with torch.inference_mode():
            told_here = models[0](ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
        assert told[prompt:] == pytest.approx(told_here[prompt - 1 :, 0].tolist(), abs=1e-3)
    for child in multiprocessing.active_children():
        if child.pid not in before:  # it was told to end
            child.join(60)
            assert not child.is_alive(), "it was left"

"""The real SGLang: its answers, its weights, and how it dies."""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.processed_logits import END, changed
from support.sglang import START_SECONDS, SglangServer, needs_sglang
from support.vllm_engines import PROMPT, asks, furthest, in_a_loop, logprobs, written
from transformers import PreTrainedModel

from rlake.loop.config.engines import SglangEngine as Settings
from rlake.loop.inference import Weights
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.policy import PolicyError, Sampling
from rlake.loop.inference.sglang_engine.engine import SglangEngine
from rlake.loop.inference.sglang_engine.server import Labeled, Server
from rlake.store.errors import ConfigError, JobError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_sglang]


@pytest.fixture(scope="module")
def engine(server: SglangServer, versions: list[Weights]) -> Iterator[SglangEngine]:
    made = server.engine(restart_timeout=START_SECONDS)
    asyncio.run(made.swap(versions[0]))
    yield made
    asyncio.run(made.close())


@in_a_loop
async def test_greedy_answers_and_log_probs_are_those_of_transformers(
    engine: SglangEngine, server: SglangServer, versions: list[Weights], models: list[Any]
):
    for weights in (versions[1], versions[0]):
        await engine.swap(weights)
        assert (engine.version, engine.digest) == (weights.version, weights.digest)
        [greedy] = await engine.complete(asks(1, temperature=0.0))
        model = models[weights.version]
        assert logprobs(model, greedy.token_ids).argmax(-1).tolist() == list(greedy.token_ids)
        assert furthest([greedy], models) < 1e-3
        assert [s.digest for s in greedy.segments] == [weights.digest]
        # What the server multiplies with, byte by byte.
        [rank] = server.get("/weights_checker", action="checksum")["ranks"]
        held, state = rank["checksums"], load_file(weights.file)
        whole = {name: tensor for name, tensor in state.items() if name in held}
        assert len(whole) >= 10
        for name, tensor in whole.items():
            if "embed_tokens" in name:  # SGLang pads the vocabulary
                tensor = torch.cat([tensor, torch.zeros(64 - len(tensor), tensor.shape[1])])
            assert held[name] == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16], name


@in_a_loop
async def test_log_probs_are_of_the_full_distribution(
    engine: SglangEngine, models: list[PreTrainedModel]
):
    cuts: list[dict[str, Any]] = [{}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.3}]
    settings = [{"temperature": t, **cut} for t in (0.7, 1.0, 1.3) for cut in cuts]
    settings.append({"temperature": 0.0})
    # in one batch, greedy ones among them
    requests = [asks(1, max_tokens=40, **how)[0] for how in settings]
    for request, one in zip(requests, await engine.complete(requests), strict=True):
        temperature = request.sampling.temperature or 1.0
        assert furthest([one], models, temperature) < 1e-4
        found = logprobs(models[engine.version], one.token_ids, temperature)
        for place, token in zip(found, one.token_ids, strict=True):
            if request.sampling.top_k:
                assert token in place.topk(request.sampling.top_k).indices
            assert place[token] >= place.max() + torch.tensor(request.sampling.min_p).log() - 1e-4
    [likely] = await engine.complete(asks(1, max_tokens=5, top_logprobs=3))
    assert likely.top_logprobs is not None
    for place, row in zip(
        likely.top_logprobs, logprobs(models[engine.version], likely.token_ids), strict=True
    ):
        values, tokens = row.topk(3)
        assert [t for t, _ in place] == tokens.tolist()
        assert [p for _, p in place] == pytest.approx(values.tolist(), abs=1e-4)


@in_a_loop
async def test_penalties_biases_and_grammars_change_what_is_sampled_and_no_log_prob(
    engine: SglangEngine, models: list[PreTrainedModel]
):
    hows: list[dict[str, Any]] = [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.5, "frequency_penalty": -0.4, "top_logprobs": 3},
        {"min_tokens": 30, "logit_bias": ((END, 50.0),)},
    ]
    requests = [asks(1, max_tokens=40, temperature=0.0, **how)[0] for how in hows]
    for request, one in zip(requests, await engine.complete(requests), strict=True):
        assert furthest([one], models) < 1e-4
        rows_TV = logprobs(models[engine.version], one.token_ids)
        for place, row in zip(one.top_logprobs or (), rows_TV, strict=False):
            assert [p for _, p in place] == pytest.approx(row.topk(3)[0].tolist(), abs=1e-4)
        assert len(one.top_logprobs or ()) in (0, len(one.token_ids))
        with torch.no_grad():
            ids = torch.tensor([[*PROMPT, *one.token_ids]])
            raw_TV = models[engine.version](input_ids=ids).logits[0, len(PROMPT) - 1 :]
        for i, token in enumerate(one.token_ids):
            # SGLang's repetition penalty looks at the answer, not at the prompt.
            made = changed(
                raw_TV[i].double().numpy(), [], list(one.token_ids[:i]), request.sampling
            )
            assert made[token] > made.max() - 1e-3, request.sampling
    policy = ChatPolicy(engine)
    schema = Sampling(max_tokens=6, json_schema='{"type": "integer", "minimum": 10}')
    [answer] = await policy.generate([{"role": "user", "content": "1+1="}], sampling=schema)
    assert answer.text.isdigit()
    assert answer.finish_reason in ("stop", "length")
    assert answer.logprobs is not None
    ids = [*(answer.prompt_ids or ()), *(answer.token_ids or ())]
    with torch.no_grad():
        whole = models[engine.version](torch.tensor([ids])).logits[0].log_softmax(-1)
    own = whole[len(answer.prompt_ids or ()) - 1 : -1].gather(
        -1, torch.tensor(answer.token_ids)[:, None]
    )
    assert own[:, 0].tolist() == pytest.approx(list(answer.logprobs), abs=1e-4)


@in_a_loop
async def test_requests_under_way_go_on_with_new_weights_and_say_so(
    engine: SglangEngine, versions: list[Weights], models: list[PreTrainedModel]
):
    await engine.swap(versions[0])
    has_begun = asyncio.Event()
    tokens: list[int] = []
    loop = asyncio.get_running_loop()

    def on_tokens(new: Any) -> None:
        tokens.extend(new)
        if len(tokens) > 20:
            loop.call_soon_threadsafe(has_begun.set)

    requests = asks(4, max_tokens=500, ignore_eos=True)
    requests[0] = replace(requests[0], on_tokens=on_tokens)
    answers = asyncio.ensure_future(engine.complete(requests))
    await asyncio.wait_for(has_begun.wait(), 60)
    # In memory, as a trainer beside the explorer gives them.
    await engine.swap(replace(versions[1], state=load_file(versions[1].file), folder=None))
    found = await answers
    assert [[s.policy_version for s in one.segments] for one in found] == [[0, 1]] * 4
    assert all(len(one.token_ids) == 500 for one in found)
    assert furthest(found, models) < 1e-3
    assert tokens == list(found[0].token_ids)
    scored = await engine.score(PROMPT, found[0].token_ids)
    want = logprobs(models[1], found[0].token_ids).gather(
        -1, torch.tensor(found[0].token_ids)[:, None]
    )
    assert scored == pytest.approx(want[:, 0].tolist(), abs=1e-3)


@in_a_loop
async def test_answers_end_at_stop_texts_and_when_they_are_aborted(engine: SglangEngine):
    found = await engine.complete(asks(8, max_tokens=200, stop=("1", "2")))
    for one in found:
        text = engine.tokenizer.decode(list(one.token_ids))
        assert one.finish_reason == "stop"
        assert not set("12") & set(str(text)[:-1])
    requests = asks(2, max_tokens=2000, ignore_eos=True)
    answers = asyncio.ensure_future(engine.complete(requests))
    await asyncio.sleep(0)
    engine.abort(requests[:1])
    first, second = await answers
    assert first.finish_reason == "abort"
    assert len(first.token_ids) < 2000 == len(second.token_ids)
    with pytest.raises(PolicyError, match="leave one of `stop` and `min_tokens` out"):
        await engine.complete(asks(1, stop=("1",), min_tokens=2))
    with pytest.raises(PolicyError, match=r"`min_tokens` changes the distribution .* at 1|to 1"):
        await engine.complete(asks(1, min_tokens=2, temperature=0.5))
    with pytest.raises(PolicyError, match="refuses /generate: repetition_penalty must be"):
        await engine.complete(asks(1, repetition_penalty=3.0))


@in_a_loop
async def test_weights_that_are_damaged_or_of_another_model_leave_the_old_ones(
    engine: SglangEngine, server: SglangServer, versions: list[Weights], tmp_path: Path
):
    await engine.swap(versions[0])
    with pytest.raises(JobError, match=r"has digest .* was published; restore"):
        await engine.swap(replace(versions[1], digest="0" * 32))
    other = written(tmp_path / "other", 2, hidden_size=32)
    with pytest.raises(JobError, match="belongs to another model"):
        await engine.swap(other)
    assert other.folder is not None
    with pytest.raises(ConfigError, match=r"with `hidden_size` 64, and the run's model has 32"):
        SglangEngine(other.folder, Settings(urls=(server.url,)))
    # What the server itself refuses: it is given the old ones before it goes on.
    assert versions[0].folder is not None
    client = Server(server.url, Settings(urls=(server.url,)))
    old = Labeled(folder=versions[0].folder, label=json.dumps([0, versions[0].digest]))
    with pytest.raises(JobError, match="refuses /update_weights_from_disk"):
        await client.load(Labeled(folder=tmp_path / "gone", label="[9, null]"), old)
    assert client.label == old.label
    await client.close()
    [one] = await engine.complete(asks(1, max_tokens=5))
    assert [s.digest for s in one.segments] == [versions[0].digest]


@in_a_loop
async def test_a_server_that_was_restarted_gets_the_newest_weights_again(
    engine: SglangEngine, server: SglangServer, versions: list[Weights], models: list[Any]
):
    await engine.swap(versions[1])
    answers = asyncio.ensure_future(engine.complete(asks(4, max_tokens=1500, ignore_eos=True)))
    await asyncio.sleep(0)
    server.kill()
    server.start(is_awaited=False)
    found = await answers
    assert [[s.policy_version for s in one.segments] for one in found] == [[1]] * 4
    assert furthest(found, models) < 1e-3
    # One that forgot its weights without a broken connection, since nothing was under way.
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    [one] = await engine.complete(asks(1, max_tokens=8))
    assert [s.digest for s in one.segments] == [versions[1].digest]
    gone = server.engine(restart_timeout=0.0)
    server.kill()
    with pytest.raises(PolicyError, match=r"did not answer .* waited for 0 s"):
        await gone.complete(asks(1))
    await gone.close()
    server.start()

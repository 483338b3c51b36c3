"""The engine in our process: requests come and go in one batch, and so do weights."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import speaking, tiny
from transformers import PreTrainedModel

from rlake.loop.config.engines import TransformersEngine as Settings
from rlake.loop.inference import Request, Sampled, Weights
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.policy import Completion, PolicyError, Sampling, Segment
from rlake.loop.inference.transformers_engine.batch import Batch
from rlake.loop.inference.transformers_engine.engine import TransformersEngine
from rlake.loop.inference.transformers_engine.model_runner import ModelRunner
from rlake.loop.inference.transformers_engine.sequence import Call
from rlake.loop.inference.transformers_engine.sequence import Sequence as Running
from rlake.loop.models.lm_head import head_of
from rlake.loop.models.state_dict import copied, digest_of, weights_digest
from rlake.loop.models.token_logprobs import token_logprobs
from rlake.store.errors import ConfigError, JobError
from rlake.store.records import Message

PROMPT = [3, 4, 13, 5, 14]


def asks(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def model_of(policy: ChatPolicy) -> Any:
    assert isinstance(policy.engine, TransformersEngine)
    return policy.engine.model


def endless(*, settings: Settings | None = None, **spec: Any) -> TransformersEngine:
    """Make an engine whose model never ends by itself, but for its length."""
    model, tokenizer = tiny(
        **{"layers": 2, "hidden_size": 32, "heads": 4, "max_length": 512} | spec
    )
    tokenizer.add_special_tokens({"eos_token": "<end>"})  # the model has no such token
    return TransformersEngine(model, tokenizer, settings)


def request(n: int = 8, *, seed: int = 0, prompt: Sequence[int] = PROMPT, **rest: Any) -> Request:
    return Request(prompt_ids=prompt, sampling=Sampling(max_tokens=n, seed=seed, **rest))


def version(number: int, *, seed: int, **spec: Any) -> tuple[Weights, PreTrainedModel]:
    """Make another version of the endless model's weights."""
    model = endless(max_length=512, **spec).model
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for value in model.parameters():
            value += 0.02 * torch.randn(value.shape, generator=generator)
    return Weights(version=number, digest=digest_of(model), state=copied(model)), model


def logprobs(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return token_logprobs(model, torch.tensor([list(tokens)]))[0]


@contextmanager
def calls(model: Any) -> Iterator[list[tuple[int, int]]]:
    """Note (sequences, tokens) of each step of the model."""
    seen: list[tuple[int, int]] = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    yield seen
    hook.remove()


def test_requests_that_are_sent_together_are_one_batch() -> None:
    ours = speaking(sampling=Sampling(max_tokens=4, seed=1))

    async def ask() -> list[list[Completion]]:
        return await asyncio.gather(*(ours.generate(asks(p), n=2) for p in ("1+1=", "2=", "30+4=")))

    with calls(model_of(ours)) as seen:
        answers = asyncio.run(ask())
    assert seen[0] == (3, 5)
    assert [n for n, _ in seen[1:]] == sorted((n for n, _ in seen[1:]), reverse=True)
    assert len(seen) <= 4
    assert [len(a) for a in answers] == [2, 2, 2]


def test_requests_join_and_leave_a_running_batch() -> None:
    engine = endless()
    lengths = [3, 30, 9, 14, 5]

    async def ask() -> list[list[Sampled]]:
        first = asyncio.create_task(engine.complete([request(lengths[0])]))
        others = [asyncio.create_task(engine.complete([request(n)])) for n in lengths[1:]]
        await first
        late = engine.complete([request(6, seed=3)])
        return await asyncio.gather(first, *others, late)

    with calls(engine.model) as seen:
        got = asyncio.run(ask())
    assert [len(g[0].token_ids) for g in got] == [len(g[0].logprobs) for g in got] == [*lengths, 6]
    assert {g[0].finish_reason for g in got} == {"length"}
    assert len(seen) == 31  # the longest one's steps, and one reading more
    assert seen[-1] == (1, 1)
    alone = asyncio.run(engine.complete([request(6, seed=3)]))
    assert alone[0].token_ids == got[-1][0].token_ids


def test_a_request_for_no_token_leaves_the_others_theirs() -> None:
    async def ask() -> list[Sampled]:
        return await endless().complete([request(0), request(5)])

    assert len(asyncio.run(ask())[1].token_ids) == 5


def test_the_same_requests_sent_together_again_give_the_same_bits() -> None:
    def ask() -> list[Any]:
        engine = endless(settings=Settings(max_requests=5))

        async def both(i: int) -> list[Sampled]:
            [one] = await engine.complete([request(3 + 5 * (i % 4), seed=i, prompt=[3 + i % 9, 4])])
            said = [3, *one.token_ids]
            return [one, *await engine.complete([request(7, seed=i, prompt=said)])]

        async def ask_all() -> list[list[Sampled]]:
            return await asyncio.gather(*(both(i) for i in range(12)))

        return [(s.token_ids, s.logprobs) for pair in asyncio.run(ask_all()) for s in pair]

    assert ask() == ask()


def test_more_than_fit_wait_in_their_order() -> None:
    engine = endless(settings=Settings(max_requests=3, max_cache_tokens=64))

    async def ask() -> list[Sampled]:
        many = [request(6 + i, seed=i) for i in range(10)]
        return [one for part in await asyncio.gather(engine.complete(many)) for one in part]

    with calls(engine.model) as seen:
        got = asyncio.run(ask())
    assert max(n for n, _ in seen) == 3
    assert [len(s.token_ids) for s in got] == [6 + i for i in range(10)]
    queued = [s.timing.queued for s in got]
    assert max(queued[:3]) < min(queued[3:])
    assert all(0 <= s.timing.queued < s.timing.first_token < s.timing.total for s in got)


def test_an_answer_that_the_cache_has_no_room_for_is_cut_and_a_prompt_is_refused() -> None:
    engine = endless(settings=Settings(max_cache_tokens=20))
    [got] = asyncio.run(engine.complete([request(100)]))
    assert (len(got.token_ids), got.finish_reason) == (15, "length")
    with pytest.raises(PolicyError, match="the prompt has 20 tokens, the engine takes 20") as told:
        asyncio.run(engine.complete([request(prompt=[3] * 20)]))
    assert told.value.finish_reason == "context_overflow"


def test_an_answer_carries_what_was_sampled() -> None:
    ours = speaking(version=3, sampling=Sampling(temperature=0.8, max_tokens=6, seed=4))
    [got] = asyncio.run(ours.generate(asks("12+3=")))
    assert got.prompt_ids is not None
    assert got.token_ids is not None
    assert got.logprobs is not None
    assert ours.engine.tokenizer.decode(list(got.prompt_ids)) == "12+3="
    assert got.text == ours.engine.tokenizer.decode(list(got.token_ids), skip_special_tokens=True)
    assert got.policy_version == 3
    assert got.segments == [Segment(policy_version=3, num_tokens=len(got.token_ids))]
    assert len(got.logprobs) == len(got.token_ids)


def test_answers_differ_and_are_the_same_with_a_seed_however_many_are_asked_for() -> None:
    ours = speaking()

    def ask(seed: int, n: int = 8) -> list[str]:
        sampling = Sampling(max_tokens=12, seed=seed)
        return [c.text for c in asyncio.run(ours.generate(asks("1+2="), n=n, sampling=sampling))]

    first = ask(0)
    assert len(set(first)) > 4
    assert ask(0) == first
    assert ask(0, n=2) == first[:2]
    assert ask(1) != first


def test_a_prompt_that_fills_the_model_is_refused_and_a_long_one_gets_what_room_is_left() -> None:
    ours = speaking(sampling=Sampling(max_tokens=30))
    with pytest.raises(JobError, match="the prompt has 48 tokens, the model takes 48"):
        asyncio.run(ours.generate(asks("1" * 48)))
    answers = asyncio.run(ours.generate(asks("1" * 46), n=20))
    assert max(len(c.token_ids or ()) for c in answers) == 2


def test_a_text_to_stop_at_ends_an_answer_and_stays_part_of_it() -> None:
    engine = endless()
    [free] = asyncio.run(engine.complete([request(60, seed=5)]))

    def text(one: Sampled) -> str:
        return str(engine.tokenizer.decode(list(one.token_ids), skip_special_tokens=True))

    said = text(free)
    stop = said[20:22]
    [got] = asyncio.run(engine.complete([request(60, seed=5, stop=("never", stop))]))
    assert text(got) == said[: said.index(stop) + 2]
    assert got.finish_reason == "stop"


def test_when_the_model_fails_everyone_who_waits_is_told_and_the_next_request_is_answered() -> None:
    ours = speaking(sampling=Sampling(max_tokens=2))

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    async def ask() -> list[Any]:
        return await asyncio.gather(
            *(ours.generate(asks(p)) for p in ("1+1=", "2=")), return_exceptions=True
        )

    hook = model_of(ours).get_decoder().register_forward_pre_hook(broken)
    for error in asyncio.run(ask()):
        assert isinstance(error, PolicyError)
        assert "sampling failed: RuntimeError: out of memory" in str(error)
    hook.remove()
    assert [len(a) for a in asyncio.run(ask())] == [1, 1]


def test_weights_that_are_no_numbers_are_an_error_and_not_an_answer() -> None:
    engine = endless()
    broken, _ = version(1, seed=1)
    assert broken.state is not None
    state = {name: torch.full_like(value, torch.nan) for name, value in broken.state.items()}
    good, _ = version(2, seed=1)

    async def ask() -> list[Sampled]:
        await engine.swap(Weights(version=1, digest=weights_digest(state), state=state))
        with pytest.raises(PolicyError, match="not numbers"):
            await engine.complete([request()])
        await engine.swap(good)
        return await engine.complete([request()])

    assert asyncio.run(ask())[0].segments[0].policy_version == 2


def test_a_waiter_that_gave_up_does_not_keep_the_others_waiting() -> None:
    engine = endless(settings=Settings(max_requests=1))

    async def ask() -> list[Sampled]:
        gone = asyncio.create_task(engine.complete([request(400)]))
        stays = asyncio.create_task(engine.complete([request(4, seed=2)]))
        await asyncio.sleep(0)
        gone.cancel()
        return await asyncio.wait_for(stays, 60)

    with calls(engine.model) as seen:
        [with_neighbour] = asyncio.run(ask())
    assert len(seen) < 20
    [alone] = asyncio.run(engine.complete([request(4, seed=2)]))
    assert with_neighbour.token_ids == alone.token_ids


def test_an_aborted_request_is_answered_with_what_it_has() -> None:
    engine = endless(settings=Settings(max_requests=1))
    heard: list[int] = []
    long, waits = replace(request(400), on_tokens=heard.extend), request(400)

    async def ask() -> list[Sampled]:
        asked = asyncio.create_task(engine.complete([long, waits, request(3)]))
        with calls(engine.model) as seen:
            while len(seen) < 5:
                await asyncio.sleep(0)
        engine.abort([long, waits])
        return await asyncio.wait_for(asked, 60)

    first, second, third = asyncio.run(ask())
    assert (first.finish_reason, second.finish_reason) == ("abort", "abort")
    assert 4 <= len(first.token_ids) < 400
    assert heard == first.token_ids
    assert sum(s.num_tokens for s in first.segments) == len(first.token_ids) == len(first.logprobs)
    assert (second.token_ids, second.segments) == ([], [])
    assert len(third.token_ids) == 3


def test_the_event_loop_is_free_while_the_model_works() -> None:
    engine = endless()

    async def ask() -> int:
        asked = asyncio.create_task(engine.complete([request(40, seed=i) for i in range(16)]))
        turns = 0
        while not asked.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(ask()) > 200


def test_what_a_dead_event_loop_left_does_not_disturb_the_next() -> None:
    engine = endless()

    async def leave() -> None:
        asyncio.create_task(engine.complete([request(500)]))  # noqa: RUF006 - left on purpose
        await asyncio.sleep(0.01)

    expected = asyncio.run(engine.complete([request(5)]))[0].token_ids
    asyncio.run(leave())
    with calls(engine.model) as seen:
        assert asyncio.run(engine.complete([request(5)]))[0].token_ids == expected
    assert {n for n, _ in seen} == {1}


def test_every_token_has_the_log_prob_of_the_weights_that_its_segment_names() -> None:
    engine = endless()
    found = [version(i + 1, seed=i) for i in range(3)]
    models = {w.version: (w.digest, model) for w, model in found}
    heard: list[list[int]] = [[], []]
    requests = [replace(request(330, seed=i), on_tokens=heard[i].extend) for i in range(2)]

    async def ask() -> list[Sampled]:
        asked = asyncio.create_task(engine.complete(requests))
        await engine.swap(found[0][0])
        for i in range(1, 100):
            await engine.swap(found[i % 3][0])
        return await asked

    got = asyncio.run(ask())
    assert min(len(one.segments) for one in got) >= 99
    assert heard == [one.token_ids for one in got]
    for one in got:
        tokens = [*PROMPT, *one.token_ids]
        by_version = {v: logprobs(model, tokens) for v, (_, model) in models.items()}
        place = len(PROMPT)
        for segment in one.segments:
            if segment.policy_version:
                assert segment.digest == models[segment.policy_version][0]
                expected = by_version[segment.policy_version][place : place + segment.num_tokens]
                sampled = one.logprobs[place - len(PROMPT) :][: segment.num_tokens]
                assert list(sampled) == pytest.approx(expected.tolist(), abs=1e-4)
            place += segment.num_tokens
        assert place == len(tokens)


def test_weights_that_are_not_what_they_are_called_leave_the_old_ones(tmp_path: Path) -> None:
    engine = endless()
    good, _ = version(1, seed=1)
    wrong = Weights(version=2, digest="0" * 32, state=good.state)
    other = Weights(version=2, digest="0" * 32, state=copied(tiny()[0]))
    gone = Weights(version=2, digest=good.digest, folder=tmp_path)

    async def ask() -> None:
        await engine.swap(good)
        before = await engine.complete([request()])
        bad = [(wrong, "not what was published"), (other, "another model"), (gone, "are gone")]
        for weights, told in bad:
            with pytest.raises(JobError, match=told):
                await engine.swap(weights)
        after = await engine.complete([request()])
        assert after[0].logprobs == before[0].logprobs

    asyncio.run(ask())
    assert (engine.version, engine.digest) == (1, good.digest)
    assert digest_of(engine.model) == good.digest


def test_a_closed_engine_answers_nobody_and_takes_no_weights() -> None:
    engine = endless()

    async def ask() -> None:
        asked = asyncio.create_task(engine.complete([request(500)]))
        await asyncio.sleep(0)
        await engine.close()
        late = engine.swap(Weights(version=1, digest="", state={}))
        for waiting in (asked, engine.complete([request()]), late):
            with pytest.raises(PolicyError, match="the engine was closed"):
                await asyncio.wait_for(waiting, 5)

    asyncio.run(ask())


def test_the_model_answers_in_evaluation_mode() -> None:
    model, tokenizer = tiny()
    model.train()
    assert not TransformersEngine(model, tokenizer).model.training


def test_a_model_that_remembers_more_than_keys_and_values_is_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    _, tokenizer = tiny()
    settings = MambaConfig(vocab_size=15, hidden_size=8, num_hidden_layers=1, state_size=2)
    with pytest.raises(ConfigError, match="cannot run `MambaForCausalLM`"):
        TransformersEngine(MambaForCausalLM(settings), tokenizer)


def test_a_model_that_is_its_own_decoder_is_refused_and_has_no_head() -> None:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    _, tokenizer = tiny()
    settings = Llama4TextConfig(
        vocab_size=15,
        hidden_size=8,
        intermediate_size=8,
        intermediate_size_mlp=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=1,
    )
    model = Llama4ForCausalLM(settings)
    with pytest.raises(ConfigError, match="cannot run `Llama4ForCausalLM`"):
        TransformersEngine(model, tokenizer)
    assert head_of(model) is None


def test_a_model_that_fails_on_its_first_tokens_is_refused_in_words() -> None:
    model, tokenizer = tiny()
    model.get_decoder().norm = torch.nn.LayerNorm(3)
    with pytest.raises(ConfigError, match=r"cannot run `\w+`: RuntimeError: .*vllm"):
        TransformersEngine(model, tokenizer)


class _StoppedMeanwhile(Running):
    """Runs when it is first looked at, and then no more, as if it was stopped in between."""

    looks = 0

    @property
    def is_running(self) -> bool:
        self.looks += 1
        return super().is_running and self.looks == 1


def test_one_that_is_stopped_while_rows_are_sorted_out_stays_one_row_until_the_next_time() -> None:
    async def sorted_out() -> None:
        model, _ = tiny()
        network = ModelRunner(model, most_tokens=1000)
        batch = Batch(network, end=0)
        call = Call(asyncio.get_running_loop().create_future(), [])
        request = Request(prompt_ids=PROMPT, sampling=Sampling(max_tokens=9))
        kinds = [Running, _StoppedMeanwhile, Running, Running]
        made = [kind(request, call, most=9) for kind in kinds]
        network.reserve(4, 20, used=0)
        network.read([one.prompt for one in made], first=0)
        batch.rows = list(made)
        made[0].finish_reason = "stop"
        batch.drop()
        assert sorted(map(made.index, batch.rows)) == [1, 2, 3]
        assert batch.ended == [made[0]]
        batch.drop()
        assert sorted(map(made.index, batch.rows)) == [2, 3]
        assert batch.ended == [made[0], made[1]]

    asyncio.run(sorted_out())

"""The policy in our process: what is asked together is sampled together."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny import tiny

from rlake.loop.optimization import token_logprobs
from rlake.loop.policy import Completion, Sampling
from rlake.loop.transformers_policy import TransformersPolicy
from rlake.store.errors import JobError
from rlake.store.records import Message


def asks(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def policy(**rest: Any) -> TransformersPolicy:
    return TransformersPolicy(*tiny(), **rest)


@contextmanager
def calls(model: torch.nn.Module) -> Iterator[list[tuple[int, int]]]:
    """Note (sequences, tokens) of each call of the model."""
    seen: list[tuple[int, int]] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    yield seen
    hook.remove()


def test_requests_that_are_sent_together_are_one_batch() -> None:
    ours = policy(sampling=Sampling(max_tokens=4, seed=1))

    async def ask() -> list[list[Completion]]:
        return await asyncio.gather(*(ours.generate(asks(p), n=2) for p in ("1+1=", "2=", "30+4=")))

    with calls(ours.model) as seen:
        answers = asyncio.run(ask())
    assert seen[0] == (3, 5)
    assert set(seen[1:]) <= {(6, 1)}
    assert len(seen) <= 4
    assert [len(a) for a in answers] == [2, 2, 2]


def test_requests_one_after_the_other_are_batches_of_their_own() -> None:
    ours = policy(sampling=Sampling(max_tokens=1))

    async def ask() -> None:
        await ours.generate(asks("1+1="))
        await ours.generate(asks("2+2="))

    with calls(ours.model) as seen:
        asyncio.run(ask())
    assert seen == [(1, 4), (1, 4)]


def test_an_answer_carries_what_was_sampled() -> None:
    ours = policy(version=3, sampling=Sampling(temperature=0.8, max_tokens=6, seed=4))
    [got] = asyncio.run(ours.generate(asks("12+3=")))
    assert got.prompt_ids is not None
    assert got.token_ids is not None
    assert got.logprobs is not None
    assert ours.tokenizer.decode(list(got.prompt_ids)) == "12+3="
    assert got.text == ours.tokenizer.decode(list(got.token_ids), skip_special_tokens=True)
    assert got.policy_version == 3
    assert got.segments == [{"policy_version": 3, "num_tokens": len(got.token_ids)}]
    with torch.no_grad():
        row = torch.tensor([[*got.prompt_ids, *got.token_ids]])
        expected = token_logprobs(ours.model, row, temperature=0.8)[0, len(got.prompt_ids) :]
    assert list(got.logprobs) == pytest.approx(expected.tolist(), abs=1e-4)


def test_answers_to_one_request_differ_and_come_again_with_the_same_seed() -> None:
    ours = policy()

    def ask(seed: int) -> list[str]:
        sampling = Sampling(max_tokens=12, seed=seed)
        return [c.text for c in asyncio.run(ours.generate(asks("1+2="), n=8, sampling=sampling))]

    first = ask(0)
    assert len(set(first)) > 4
    assert ask(0) == first
    assert ask(1) != first


def test_the_first_answers_are_the_same_however_many_are_asked_for() -> None:
    ours = policy(sampling=Sampling(max_tokens=8, seed=9))
    few = asyncio.run(ours.generate(asks("1+2="), n=2))
    many = asyncio.run(ours.generate(asks("1+2="), n=5))
    assert [c.token_ids for c in few] == [c.token_ids for c in many[:2]]


def test_a_prompt_that_fills_the_model_is_refused_and_a_long_one_gets_what_room_is_left() -> None:
    ours = policy(sampling=Sampling(max_tokens=30))
    with pytest.raises(JobError, match="the prompt has 48 tokens, the model takes 48"):
        asyncio.run(ours.generate(asks("1" * 48)))
    answers = asyncio.run(ours.generate(asks("1" * 46), n=20))
    assert max(len(c.token_ids or ()) for c in answers) == 2


def test_a_prompt_that_is_too_long_does_not_disturb_the_others() -> None:
    ours = policy(sampling=Sampling(max_tokens=2))

    async def ask() -> list[Any]:
        both = (ours.generate(asks("1" * 50)), ours.generate(asks("1+1=")))
        return list(await asyncio.gather(*both, return_exceptions=True))

    refused, answered = asyncio.run(ask())
    assert isinstance(refused, JobError)
    assert len(answered) == 1


def test_when_sampling_fails_everyone_who_waits_is_told_and_the_next_request_is_answered() -> None:
    ours = policy(sampling=Sampling(max_tokens=2))

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    async def ask() -> list[Any]:
        return await asyncio.gather(
            *(ours.generate(asks(p)) for p in ("1+1=", "2=")), return_exceptions=True
        )

    hook = ours.model.register_forward_pre_hook(broken)
    for error in asyncio.run(ask()):
        assert isinstance(error, JobError)
        assert "sampling failed: RuntimeError: out of memory" in str(error)
    hook.remove()
    assert [len(a) for a in asyncio.run(ask())] == [1, 1]


def test_the_version_is_stamped_when_the_request_is_sent() -> None:
    ours = policy(version=3, sampling=Sampling(max_tokens=2))

    async def ask() -> list[Completion]:
        sent = asyncio.create_task(ours.generate(asks("1+1=")))
        await asyncio.sleep(0)
        ours.version = 4
        return [*await sent, *await ours.generate(asks("1+1="))]

    assert [c.policy_version for c in asyncio.run(ask())] == [3, 4]


def test_a_waiter_that_gave_up_does_not_keep_the_others_waiting() -> None:
    ours = policy(sampling=Sampling(max_tokens=2))

    async def ask() -> list[Completion]:
        gone = asyncio.create_task(ours.generate(asks("1+1=")))
        stays = asyncio.create_task(ours.generate(asks("2+2=")))
        await asyncio.sleep(0)
        gone.cancel()
        return await asyncio.wait_for(stays, 5)

    with_neighbour = asyncio.run(ask())
    alone = asyncio.run(ours.generate(asks("2+2=")))
    assert [c.token_ids for c in with_neighbour] == [c.token_ids for c in alone]


def test_the_model_answers_in_evaluation_mode() -> None:
    model, tokenizer = tiny()
    model.train()
    assert not TransformersPolicy(model, tokenizer).model.training

"""The real SGLang while weights are broadcast to it: what dies or stalls in the middle."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from safetensors.torch import load_file
from support.sglang import START_SECONDS, SglangServer, needs_sglang
from support.vllm_engines import asks, furthest, in_a_loop
from transformers import PreTrainedModel

from rlake.loop.inference import Weights
from rlake.loop.inference.sglang_engine import group
from rlake.store.errors import JobError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_sglang]
PATH = "/update_weights_from_distributed"


def in_memory(weights: Weights) -> Weights:
    return replace(weights, state=load_file(weights.file), folder=None)


@pytest.fixture
def in_the_middle(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], None]], None]:
    """Do something once, when a server has a third of the tensors of an update."""
    both = vars(group.WeightGroup)["_both"]

    def arm(do: Callable[[Any], None]) -> None:
        sent = 0

        async def counted(self: Any, process: Any, path: str, body: Any) -> None:
            nonlocal sent
            sent += path == PATH
            if path == PATH and sent == 8:
                do(process)
            await both(self, process, path, body)

        monkeypatch.setattr(group, "PART_BYTES", 1)
        monkeypatch.setattr(group.WeightGroup, "_both", counted)

    return arm


@pytest.mark.parametrize("dies", ["server", "sender"])
@in_a_loop
async def test_what_dies_in_an_update_costs_no_answer_and_no_stamp(
    server: SglangServer,
    versions: list[Weights],
    models: list[PreTrainedModel],
    in_the_middle: Callable[[Callable[[Any], None]], None],
    dies: str,
):
    engine = server.engine(restart_timeout=START_SECONDS)
    died: list[str] = []

    def die(sender: Any) -> None:
        died.append(dies)
        if dies == "sender":
            sender.kill()
        else:
            server.kill()
            server.start(is_awaited=False)

    in_the_middle(die)
    answers = asyncio.ensure_future(engine.complete(asks(4, max_tokens=1500, ignore_eos=True)))
    await asyncio.sleep(0)
    await engine.swap(in_memory(versions[1]))
    assert died == [dies]
    assert (engine.version, engine.digest) == (1, versions[1].digest)
    [late] = await engine.complete(asks(1))
    assert [s.digest for s in late.segments] == [versions[1].digest]
    assert furthest([late, *await answers], models) < 1e-3
    await engine.swap(in_memory(versions[0]))
    [one] = await engine.complete(asks(1))
    assert [s.digest for s in one.segments] == [versions[0].digest]
    assert furthest([one], models) < 1e-3
    await engine.close()


@in_a_loop
async def test_a_server_that_stalls_in_an_update_is_left_and_has_the_old_weights_when_it_is_back(
    server: SglangServer,
    versions: list[Weights],
    models: list[PreTrainedModel],
    in_the_middle: Callable[[Callable[[Any], None]], None],
):
    engine = server.engine(restart_timeout=20.0, request_timeout=30.0)
    await engine.swap(versions[1])
    await engine.swap(replace(versions[0], version=2))
    assert server.process is not None
    stalled = server.process.pid
    in_the_middle(lambda _: os.killpg(stalled, signal.SIGSTOP))
    began = time.monotonic()
    try:
        with pytest.raises(JobError, match=r"waited for 20 s \(`restart_timeout`\)"):
            await engine.swap(in_memory(replace(versions[1], version=3)))
        assert time.monotonic() - began < 150
    finally:
        os.killpg(stalled, signal.SIGCONT)
    assert (engine.version, engine.digest) == (2, versions[0].digest)
    [one] = await engine.complete(asks(1))
    assert [(s.policy_version, s.digest) for s in one.segments] == [(2, versions[0].digest)]
    own = replace(one, segments=[replace(s, policy_version=0) for s in one.segments])
    assert furthest([own], models) < 1e-3
    await engine.close()

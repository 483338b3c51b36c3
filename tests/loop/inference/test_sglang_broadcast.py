"""Weights in memory on their way to a stand-in for SGLang, by the real process that sends them."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.sglang_standin import WAIT, Standin
from support.vllm_engines import asks, in_a_loop, written

from rlake.loop.config.engines import SglangEngine as Settings
from rlake.loop.inference import Weights
from rlake.loop.inference.sglang_engine import fleet, group
from rlake.loop.inference.sglang_engine.engine import SglangEngine
from rlake.loop.models.state_dict import weights_digest
from rlake.store.errors import ConfigError, JobError

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "0"
    written(made, 0)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Standin]:
    made = Standin(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet, "AGAIN_SECONDS", 0.01)
        yield made
    made.close()


@pytest.fixture(scope="module")
def engine(folder: Path, server: Standin) -> Iterator[SglangEngine]:
    """One for all tests: its process that sends takes seconds to start."""
    made = connected(folder, server)
    yield made
    assert len(senders()) == 1
    asyncio.run(made.close())
    assert senders() == []


def in_memory(folder: Path, version: int, dtype: torch.dtype = torch.float32) -> Weights:
    file = written(folder.parent / str(version), version).file
    state = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    return Weights(version=version, digest=weights_digest(state), state=state)


def connected(folder: Path, server: Standin, **settings: Any) -> SglangEngine:
    return SglangEngine(folder, Settings(urls=(server.url,), **settings))


def senders() -> list[int]:
    """Return the processes that send weights for this one."""
    own = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for path in own for pid in path.read_text().split()]
    return [p for p in pids if b"sglang_engine.sender" in Path(f"/proc/{p}/cmdline").read_bytes()]


@in_a_loop
async def test_tensors_arrive_in_parts_and_the_last_one_brings_the_label(
    folder: Path, server: Standin, engine: SglangEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(group, "PART_BYTES", 20_000)
    for version, dtype in ((1, torch.float32), (2, torch.bfloat16)):
        weights = in_memory(folder, version, dtype)
        server.stamps = []
        await engine.swap(weights)
        *first, last = server.stamps
        assert len(first) >= 3
        assert set(first) == {None}
        assert last == server.label
        assert weights_digest(server.received[-1]) == weights.digest == engine.digest
        [one] = await engine.complete(asks(1, max_tokens=4))
        assert [(s.policy_version, s.digest) for s in one.segments] == [(version, weights.digest)]
    assert server.updates[-2:] == [1, 2]
    assert (len(server.groups), len(senders()), server.is_updating) == (1, 1, False)


@in_a_loop
async def test_a_server_that_forgot_the_group_gets_the_weights_by_a_new_one(
    folder: Path, server: Standin, engine: SglangEngine
):
    await engine.swap(in_memory(folder, 3))
    forgotten = dict(server.groups)  # their connections stay: the sender does not notice
    server.groups.clear()
    server.label, server.is_updating = "default", True  # as one of another client that was killed
    weights = in_memory(folder, 4)
    await engine.swap(weights)
    assert weights_digest(server.received[-1]) == weights.digest
    assert (server.updates[-2:], len(server.groups), len(senders())) == ([3, 4], 1, 1)
    assert forgotten.keys().isdisjoint(server.groups)


@in_a_loop
async def test_what_a_server_refuses_leaves_it_the_tensors_that_it_had(
    folder: Path, server: Standin, engine: SglangEngine
):
    old = in_memory(folder, 7)
    await engine.swap(old)
    server.refused = (8, 400)
    with pytest.raises(JobError, match=r"refuses /update_weights_from_distributed: .*: no"):
        await engine.swap(in_memory(folder, 8))
    assert weights_digest(server.received[-1]) == old.digest == engine.digest
    [one] = await engine.complete(asks(1, max_tokens=4))
    assert [s.policy_version for s in one.segments] == [7]


@in_a_loop
async def test_weights_whose_sender_is_killed_are_sent_again(
    folder: Path, server: Standin, engine: SglangEngine
):
    await engine.swap(in_memory(folder, 5))
    server.hold("/update_weights_from_distributed")
    weights = in_memory(folder, 6)
    swap = asyncio.ensure_future(engine.swap(weights))
    assert await asyncio.to_thread(server.has_request.wait, WAIT)
    [killed] = senders()
    os.kill(killed, signal.SIGKILL)
    server.goes_on.set()
    await asyncio.wait_for(swap, 3 * WAIT)
    assert weights_digest(server.received[-1]) == weights.digest == engine.digest
    assert (server.updates[-1], server.is_updating) == (6, False)
    [one] = await engine.complete(asks(1, max_tokens=4))
    assert [s.policy_version for s in one.segments] == [6]


@in_a_loop
async def test_damaged_weights_and_several_replicas_are_refused_before_anything_is_sent(
    folder: Path,
):
    server = Standin(folder)
    server.info["dp_size"] = 2
    engine = connected(folder, server)
    try:
        with pytest.raises(JobError, match=r"has digest .* was published"):
            await engine.swap(replace(in_memory(folder, 1), digest="0" * 32))
        with pytest.raises(JobError, match=r"`dp_size` is 2; start it with 1, or set `schedule.w"):
            await engine.swap(in_memory(folder, 1))
        assert (server.received, engine.version) == ([], 0)
        [one] = await engine.complete(asks(1, max_tokens=4))
        assert [s.policy_version for s in one.segments] == [0]
    finally:
        await engine.close()
        server.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_without_a_gpu_is_refused_at_the_start(folder: Path, server: Standin):
    with pytest.raises(ConfigError, match="`broadcast_backend` is nccl, and this process has no"):
        connected(folder, server, broadcast_backend="nccl")

"""The real vLLM while its weights are updated: killed in the middle, and with an adapter."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.audit import audit
from support.tiny_models import config, table, tiny
from support.vllm_engines import SPEC, asks, furthest, in_a_loop, written
from transformers import PreTrainedModel

from rlake.loop.config import LoraConfig
from rlake.loop.config.engines import VllmEngine as Settings
from rlake.loop.inference import Weights
from rlake.loop.inference.shared_tensors import SharedBlock
from rlake.loop.inference.vllm_engine.engine import VllmEngine
from rlake.loop.models.adapter_files import write_settings
from rlake.loop.models.lora import add_adapter
from rlake.loop.models.state_dict import put_state, state_of, weights_digest
from rlake.loop.run import run
from rlake.store import Store
from rlake.store.errors import JobError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm; `make .venv/.vllm`"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]


def started(folder: Path, settings: Settings | None = None) -> VllmEngine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        return VllmEngine(folder, settings)


WATCH = """
import os, signal, sys
from pathlib import Path

def children(pid):
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in file.read_text().split():
            yield child
            yield from children(child)

def kills():
    try:
        for pid in children(sys.argv[1]):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            # Private, as the worker maps them; from its parent it inherits a shared mapping.
            if any(" rw-p " in line and "rlake-weights" in line for line in maps):
                os.kill(int(pid), signal.SIGKILL)
                print(pid, flush=True)
                return True
    except OSError:  # one of them has just ended
        pass
    return False

print("watching", flush=True)
# A line for each update that begins: to look all the time would take a core for a minute.
for line in sys.stdin:
    while os.getppid() == int(sys.argv[1]) and not kills():
        pass
"""


@contextmanager
def killed_while_they_load() -> Iterator[list[str]]:
    """Kill each vLLM that maps weights in memory, as it does only while it loads them."""
    killed: list[str] = []
    command = [sys.executable, "-c", WATCH, str(os.getpid())]
    watcher = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True)
    assert watcher.stdout is not None
    assert watcher.stdout.readline() == "watching\n"
    write = SharedBlock.write

    def watched(self: SharedBlock, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        assert watcher.stdin is not None
        watcher.stdin.write("an update begins\n")
        watcher.stdin.flush()
        return write(self, state)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SharedBlock, "write", watched)
            yield killed
    finally:
        watcher.kill()
        killed += dict.fromkeys(watcher.communicate()[0].split())


LARGER = SPEC | {"hidden_size": 256, "heads": 4, "layers": 4}
"""A model that takes so long to load that vLLM is seen doing it."""


@in_a_loop
async def test_vllm_that_is_killed_during_an_update_goes_on_with_the_old_weights(tmp_path: Path):
    old = written(tmp_path / "old", 0, **LARGER)
    models = [tiny(seed=i, **LARGER)[0].eval() for i in range(2)]
    state = state_of(models[1])
    new = Weights(version=1, digest=weights_digest(state), state=state)
    assert old.folder is not None
    engine = started(old.folder)
    try:
        await engine.swap(old)
        work = asyncio.create_task(engine.complete(asks(2, max_tokens=500)))
        await asyncio.wait({work}, timeout=0.2)
        with killed_while_they_load() as killed, pytest.raises(JobError, match="vLLM's engine"):
            await engine.swap(new)
        assert len(killed) == 2, "a second vLLM was given the new weights, and was killed too"
        assert (engine.version, engine.digest) == (0, old.digest)
        # those that were under way go on in a third one, with the weights that began them
        for sampled in (await work, await engine.complete(asks(2))):
            assert {s.digest for one in sampled for s in one.segments} == {old.digest}
            assert furthest(sampled, models) < 1e-3
        assert engine.restarts == 2
        await engine.swap(new)
        sampled = await engine.complete(asks(2))
        assert {s.digest for one in sampled for s in one.segments} == {new.digest}
        assert furthest(sampled, models) < 1e-3
    finally:
        await engine.close()


@in_a_loop
async def test_an_adapter_is_loaded_as_one_and_gives_the_log_probs_of_the_trainers_model(
    tmp_path: Path,
):
    models = [with_adapter(seed) for seed in range(3)]
    first = tmp_path / "run" / "policies" / "v000000"
    folders = [first, first.with_name("v000001")]
    for model, folder in zip(models, folders, strict=False):
        folder.mkdir(parents=True)
        write_settings(model, folder, run_folder=tmp_path / "run", tokenizer=tiny(**SPEC)[1])
        tiny(**SPEC)[1].save_pretrained(folder)
        save_file(state_of(model), folder / "adapter_model.safetensors")
    digests = [weights_digest(state_of(model)) for model in models]
    engine = started(first, Settings(sleep=True, memory_share=0.5))
    try:
        for version, weights in (
            (0, None),  # it has the adapter of the folder that it starts with
            (1, Weights(version=1, digest=digests[1], folder=folders[1])),
            (2, Weights(version=2, digest=digests[2], state=state_of(models[2]))),
        ):
            if weights is not None:
                await engine.swap(weights)
                assert engine.digest == digests[version]
            assert engine.verified == (28, 28), "A and B of each of seven matrices in two layers"
            sampled = await engine.complete(asks(3))
            assert {s.policy_version for one in sampled for s in one.segments} == {version}
            assert furthest(sampled, models) < 1e-4
            await engine.sleep()
            assert engine.backend is not None
            assert engine.backend.is_asleep
            again = await engine.complete(asks(3))
            assert not engine.backend.is_asleep
            assert [one.token_ids for one in again] == [one.token_ids for one in sampled]
            prompt, ids = [3, 4, 13], [5, 14, 6, 7]
            with torch.inference_mode():
                logits = models[version](torch.tensor([prompt + ids])).logits[0, 2:-1]
            own = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
            assert await engine.score(prompt, ids) == pytest.approx(own.tolist(), abs=1e-4)
            await engine.sleep()  # the next weights wake it up
        wrong = {name: tensor + 1 for name, tensor in state_of(models[0]).items()}
        with pytest.raises(JobError, match="what came of version 3 has digest"):
            await engine.swap(Weights(version=3, digest=digests[0], state=wrong))
        assert (engine.version, engine.digest) == (2, digests[2])
        assert furthest(await engine.complete(asks(1)), models) < 1e-4
    finally:
        await engine.close()


def with_adapter(seed: int) -> PreTrainedModel:
    """The same base model with an adapter as large as the weights that it changes."""
    model = tiny(**SPEC)[0].eval()
    add_adapter(model, LoraConfig(rank=4, alpha=8.0), seed=0)
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: torch.randn(tensor.shape, generator=generator) * 0.3
        for name, tensor in state_of(model).items()
    }
    put_state(model, state)
    return model


@pytest.mark.parametrize(
    "trainer", [{}, {"distributed": {"world_size": 2}}], ids=["adapter", "sharded"]
)
def test_a_run_gives_vllm_each_version_through_memory_and_vllm_sleeps_while_it_trains(
    store: Store, trainer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    slept: list[int] = []
    sleep = VllmEngine.sleep

    async def noted(engine: VllmEngine) -> None:
        slept.append(engine.version)
        await sleep(engine)

    monkeypatch.setattr(VllmEngine, "sleep", noted)
    settings = config(
        model={
            "from_scratch": SPEC | {"alphabet": "0123456789+="},
            "lora": None if trainer else {"rank": 2},
        },
        explorer={
            "engine": {"vllm": {"sleep": True, "memory_share": 0.5}},
            "sampling": {"max_tokens": 3},
        },
        schedule={"weight_transport": "memory", "timeout": 600},
        trainer=trainer,
    )
    run(store, settings)
    found = table(store, "experiences", "engine, policy_version")
    assert set(found["engine"]) == {"vllm"}
    assert sorted(set(found["policy_version"])) == slept == [0, 1, 2]
    assert audit(store, [])["untrue"] == []
    assert set(table(store, "policies")["transport"]) == {"memory"}

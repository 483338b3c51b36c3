"""Processes that divide a model train as one does, and what cannot be divided is refused."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from support.distributed import place, settings
from support.jobs import told
from support.model_parallel import CASES, PROCESSES, RESUMED, qwen2, qwen3_moe, steps_of, trained
from support.tiny_models import SPEC, offline
from transformers import GPT2Config, GPT2LMHeadModel

from rlake.loop.algorithms import resolve
from rlake.loop.config import RunConfig
from rlake.loop.report.plan import plan
from rlake.loop.run import train
from rlake.loop.trainer.distributed.fitting import check_models
from rlake.loop.trainer.distributed.launch import launched as processes
from rlake.loop.trainer.distributed.world import SingleProcess
from rlake.loop.trainer.memory import estimate
from rlake.loop.weight_sync import newest
from rlake.store.errors import ConfigError, JobError

TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What the processes did, in one launch for all tests of this file."""
    folder = tmp_path_factory.mktemp("launched")
    for name in RESUMED:
        trained(SingleProcess(), CASES[name], 2, write=folder / f"one {name}")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(PROCESSES)),
            *(str(TESTS / "support" / "model_parallel.py"), str(folder)),
        ],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, torch.load(folder / "told.pt", weights_only=False)


def assert_close(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Compare weights and metrics."""
    assert one["weights"].keys() == other["weights"].keys()
    for name, value in one["weights"].items():
        scale = float(value.abs().max()) or 1.0
        assert float((value - other["weights"][name]).abs().max()) <= 2e-5 * scale, name
    for ours, theirs in zip(one["metrics"], other["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_four_processes_that_divide_a_model_train_as_one_does(
    launched: tuple[Path, dict[str, Any]], name: str
) -> None:
    _, found = launched
    assert_close(trained(SingleProcess(), CASES[name], steps_of(name)), found[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_checkpoints_of_divided_models_are_read_by_any_number_of_processes(
    launched: tuple[Path, dict[str, Any]], name: str
) -> None:
    folder, found = launched
    for key, value in found[name]["weights"].items():  # bit for bit
        assert torch.equal(value, found[f"{name}, resumed"]["weights"][key]), key
    assert_close(
        trained(SingleProcess(), CASES[name], 1, read=folder / f"many {name}"),
        found[f"{name}, from one"],
    )


@pytest.mark.slow
def test_a_run_on_a_divided_model_that_is_stopped_and_resumed_publishes_what_one_process_learns(
    tmp_path: Path,
) -> None:
    one, two = place(tmp_path / "one"), place(tmp_path / "two")
    parallel: Any = {"world_size": 2, "tensor_parallel": 2}
    train(one, settings())

    def stop(event: str, step: int, measured: Mapping[str, float]) -> None:
        if event == "train" and step == 5:
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, JobError)):
        train(two, settings(**parallel), listener=stop)
    train(two, settings(**parallel), resume=True)
    assert told(two)["drawn"] == told(one)["drawn"]
    ours, theirs = (dict(cast("Any", told(run)["losses"])) for run in (one, two))
    assert theirs == pytest.approx(ours, rel=1e-5)
    published = [
        load_file(newest(s, s.runs_folder / "demo", "demo").folder / "model.safetensors")  # type: ignore[operator]
        for s in (one, two)
    ]
    assert_close(*({"weights": each, "metrics": []} for each in published))


def divided(model: Any = None, **parallel: Any) -> RunConfig:
    given = {"world_size": 12, "tensor_parallel": 3, **parallel}
    model = {"from_scratch": None, **(model or {"from_scratch": {**SPEC, "heads": 4}})}
    return offline(model=model, trainer={"distributed": given})


def test_sizes_that_do_not_divide_heads_are_refused_with_those_that_do(tmp_path: Path) -> None:
    error = (
        "`trainer.distributed`: tensor_parallel 3 does not divide 4 attention heads and 4 key-value"
        " heads of `model`; expected one of 1, 2, 4"
    )
    with pytest.raises(ConfigError, match=re.escape(error)):
        train(place(tmp_path / "store"), divided(world_size=3))
    folder = str(tmp_path / "qwen2")
    qwen2().save_pretrained(folder)
    with pytest.raises(
        ConfigError, match=r"divide 4 attention heads and 2 .*; expected one of 1, 2$"
    ):
        check_models(divided({"path": folder}), resolve("sft"))


def test_a_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    small = GPT2Config(n_layer=1, n_head=3, n_embd=12, vocab_size=16, n_positions=16)
    GPT2LMHeadModel(small).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="`GPT2LMHeadModel` has no `tp_plan` in transformers"):
        check_models(divided({"path": str(tmp_path)}), resolve("sft"))


@pytest.mark.parametrize(
    ("parallel", "error"),
    [
        ({"world_size": 8}, "tensor_parallel 3 does not divide 8 processes (`world_size`); "),
        (
            {"shard_size": 3},
            "shard 3 does not divide 4 processes for each of tensor_parallel 3; expected one of "
            "1, 2, 4",
        ),
        (
            {"expert_parallel": 5},
            "expert_parallel 5 does not divide 12 processes (`world_size`); expected one of 1, 2, 3"
            ", 4, 6, 12",
        ),
        (
            {"context_parallel": 3},
            "context_parallel 3 does not divide 4 processes for each of tensor_parallel 3",
        ),
        ({"expert_parallel": 4}, "expert_parallel 4 is not a multiple of tensor_parallel 3"),
        (
            {"expert_parallel": 6, "shard_size": 2},
            "shard_size 2 replicates the weights, and expert_parallel 6 shards them over all",
        ),
    ],
)
def test_sizes_that_do_not_divide_the_processes_are_refused(parallel: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        divided(**parallel)


def test_experts_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    error = "`Qwen3ForCausalLM` has no experts with an `ep_plan` in transformers, which "
    with pytest.raises(ConfigError, match=error):
        check_models(divided(tensor_parallel=1, expert_parallel=4), resolve("sft"))
    given = {"path": str(tmp_path)}
    qwen3_moe().save_pretrained(tmp_path)
    error = "expert_parallel 3 does not divide 4 experts of `model`; expected one of 1, 2, 4"
    with pytest.raises(ConfigError, match=error):
        check_models(divided(given, tensor_parallel=1, expert_parallel=3), resolve("sft"))
    error = "has experts, .* does not divide; set `expert_parallel` to a multiple of it"
    with pytest.raises(ConfigError, match=error):
        check_models(divided(given, tensor_parallel=2), resolve("sft"))
    check_models(divided(given, tensor_parallel=2, expert_parallel=4), resolve("sft"))


@pytest.mark.parametrize(
    ("algorithm", "trainer", "reason"),
    [
        ("ppo", {}, "critics read sequences that are not packed"),
        ("reward_model", {}, "reward models score sequences that are not packed"),
        ("jsd", {"teacher": {"path": "nowhere"}}, "whole distributions are compared on sequences"),
        ("sft", {"packing": False}, "`trainer.packing` is false"),
    ],
)
def test_sequences_that_are_not_packed_are_not_divided(
    algorithm: str, trainer: Any, reason: str
) -> None:
    parallel = {"world_size": 2, "context_parallel": 2}
    given = offline(algorithm=algorithm, trainer={"distributed": parallel, **trainer})
    with pytest.raises(ConfigError, match=reason):
        check_models(given, resolve(algorithm))


def test_attention_heads_are_divided_by_both_sizes() -> None:
    given = divided(tensor_parallel=2, context_parallel=3)
    error = (
        "context_parallel 3 does not divide 4 attention heads and 4 key-value heads of `model` "
        "for each of tensor_parallel 2; expected one of 1, 2"
    )
    with pytest.raises(ConfigError, match=re.escape(error)):
        check_models(given, resolve("sft"))


def test_one_process_cannot_divide_a_model() -> None:
    message = r"`trainer\.distributed`: tensor_parallel 2 does not divide 1 processes"
    given = divided(world_size=None, tensor_parallel=2)
    with pytest.raises(ConfigError, match=message), processes(given, stop=threading.Event()):
        pass


def test_compiled_layers_are_not_divided() -> None:
    given = divided(tensor_parallel=2)
    trainer = given.trainer.model_copy(update={"compile": True})
    with pytest.raises(ConfigError, match=r"`trainer\.compile` is true, and layers that"):
        check_models(given.model_copy(update={"trainer": trainer}), resolve("sft"))


def test_each_process_needs_memory_for_its_part_of_a_model() -> None:
    def parts(**parallel: Any) -> dict[str, int]:
        given = {"from_scratch": {**SPEC, "hidden_size": 64, "heads": 4, "layers": 4}}
        found = estimate(divided(given, **parallel), resolve("sft")).parts
        return {part.name: part.bytes for part in found}

    whole, halves = (parts(world_size=n, tensor_parallel=n) for n in (1, 2))
    assert parts(world_size=2, tensor_parallel=1)["gradients"] == whole["gradients"] // 2
    # norms, and the embeddings of 15 tokens, are whole in each process
    assert halves["gradients"] == pytest.approx(whole["gradients"] / 2, rel=0.02)
    assert 0.5 < halves["activations"] / whole["activations"] < 0.75
    assert parts(world_size=4, tensor_parallel=2)["gradients"] == halves["gradients"] // 2
    parted = parts(world_size=2, tensor_parallel=1, context_parallel=2)
    assert parted["gradients"] == whole["gradients"] // 2
    assert parted["activations"] == pytest.approx(whole["activations"] / 2, rel=0.01)


def test_a_dry_run_prints_the_meshes() -> None:
    said = plan(divided(shard_size=2, tensor_parallel=2), full=False)
    assert "the weights are on a mesh of 12 processes: replicate 3 x shard 2 x tensor 2" in said
    said = plan(divided(world_size=8, tensor_parallel=2, expert_parallel=4), full=False)
    assert "the weights are on a mesh of 8 processes: shard 4 x tensor 2" in said
    assert "the experts are on a mesh of 8 processes: shard 2 x experts 4" in said
    said = plan(divided(world_size=8, tensor_parallel=2, context_parallel=2), full=False)
    assert "the rows are on a mesh of 8 processes: data 2 x context 2 x tensor 2" in said


def test_adafactor_is_refused_where_parameters_are_sharded() -> None:
    given = divided(tensor_parallel=2, world_size=2)
    trainer = given.trainer.model_copy(update={"optimizer": "adafactor"})
    with (
        pytest.raises(ConfigError, match="is adafactor, which torch cannot compute on parameters"),
        processes(given.model_copy(update={"trainer": trainer}), stop=threading.Event()),
    ):
        pass

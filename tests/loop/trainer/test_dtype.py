"""`model.dtype`: engines, references and published weights of fewer bits; training in float32."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.audit import audit
from support.jobs import told
from support.tiny_models import SPEC, config, metric, table

import rlake
from rlake.loop.algorithms import resolve
from rlake.loop.config import RunConfig
from rlake.loop.models.state_dict import weights_digest
from rlake.loop.run import run
from rlake.loop.trainer.networks import build
from rlake.loop.weight_sync import published
from rlake.store import Store


def of_type(dtype: str, **changes: object) -> RunConfig:
    model = {"from_scratch": SPEC, "dtype": dtype}
    return config(model=model, **changes)


def state(store: Store, version: int) -> dict[str, torch.Tensor]:
    assert store.runs_folder is not None
    weights = published(store, store.runs_folder / "demo", "demo")[version]
    found = load_file(weights.file)
    assert weights_digest(found) == weights.digest
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("transport", ["store", "memory"])
def test_what_is_published_and_sampled_from_has_the_type(
    store: Store, dtype: str, transport: str
) -> None:
    kept = {"checkpoint_every": 1, "keep_checkpoints": 3}  # the last one alone may remove version 0
    run(store, of_type(dtype, schedule={"weight_transport": transport}, trainer=kept))
    for version in (0, 3):
        assert {t.dtype for t in state(store, version).values()} == {getattr(torch, dtype)}
    folder = Path(table(store, "policies").sort("policy_version")["path"][-1])
    assert store.runs_folder is not None
    settings = json.loads((store.runs_folder / "demo" / folder / "config.json").read_text())
    assert settings["dtype"] == dtype
    found = audit(store, [])
    assert found == {name: [] for name in found}


def test_an_adapter_is_trained_in_float32_on_a_base_that_is_sampled_from_in_bfloat16(
    store: Store,
) -> None:
    model = {"from_scratch": SPEC, "dtype": "bfloat16", "lora": {"rank": 4}}
    run(store, config(model=model))
    assert {t.dtype for t in state(store, 3).values()} == {torch.float32}
    assert metric(store, "train/ratio")[1] == pytest.approx(1.0, abs=2e-2)
    assert set(table(store, "experiences")["policy_version"]) == {0, 1, 2}


def test_updates_smaller_than_bfloat16_can_add_are_kept_by_the_trainer(store: Store) -> None:
    """At this rate no weight moves by half of bfloat16's step within one update."""
    steps = {"batch_size": 2, "learning_rate": 1e-5, "checkpoint_every": 1000}
    run(store, of_type("bfloat16", trainer={"steps": 1, **steps}))
    first, one = state(store, 0), state(store, 1)  # the last checkpoint may remove their folders
    run(store, of_type("bfloat16", trainer={"steps": 40, **steps}), resume=True)
    last = state(store, 40)
    name = "model.layers.0.mlp.down_proj.weight"
    moved = [(first[name] != other[name]).sum().item() for other in (one, last)]
    assert moved[1] > 5 * moved[0]


def test_a_ratio_is_one_up_to_the_rounding_of_the_type(store: Store) -> None:
    run(store, of_type("bfloat16", trainer={"steps": 1, "learning_rate": 0.0}))
    assert metric(store, "train/ratio")[1] == pytest.approx(1.0, abs=2e-2)
    assert abs(metric(store, "train/ratio")[1] - 1.0) > 1e-7, "it was not in bfloat16"


def test_a_run_in_bfloat16_is_resumed_as_if_never_stopped(tmp_path: Path) -> None:
    whole, parts = (rlake.connect(tmp_path / name) for name in ("whole", "parts"))
    trainer = {"batch_size": 2, "learning_rate": 1e-2, "checkpoint_every": 2}
    run(whole, of_type("bfloat16", trainer={"steps": 4, **trainer}))
    run(parts, of_type("bfloat16", trainer={"steps": 2, **trainer}))
    run(parts, of_type("bfloat16", trainer={"steps": 4, **trainer}), resume=True)
    assert weights_digest(state(parts, 4)) == weights_digest(state(whole, 4))
    assert told(tmp_path / "parts") == told(tmp_path / "whole")


def test_each_network_has_its_own_type() -> None:
    settings = of_type(
        "bfloat16",
        algorithm={"grpo": {"kl": {"coef": 0.1}}},
        trainer={"reference": {"from_scratch": SPEC, "dtype": "float16"}},
    )
    networks, _ = build(settings, resolve(settings.algorithm))
    assert networks.policy.dtype == torch.float32
    assert networks.reference is not None
    assert networks.reference.dtype == torch.float16
    settings = of_type("bfloat16", algorithm={"grpo": {"kl": {"coef": 0.1}}})
    networks, _ = build(settings, resolve(settings.algorithm))
    assert networks.reference is not None
    assert networks.reference.dtype == torch.bfloat16

"""Compiled layers compute what others do, and are stored under the same names."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import config
from support.updates import rows_of_a_step

from rlake.loop.algorithms import resolve
from rlake.loop.models.state_dict import state_of
from rlake.loop.trainer.checkpoints import Checkpoints
from rlake.loop.trainer.networks import build, compile_layers
from rlake.loop.trainer.step import Updater
from rlake.store.errors import ConfigError


def updater(*, compiled: bool, lora: bool) -> tuple[Any, Updater]:
    adapter = {"rank": 2} if lora else None
    trainer = {"compile": compiled, "precision": "float32", "gradient_checkpointing": lora}
    given = config(model={"lora": adapter}, trainer=trainer)
    algorithm = resolve(given.algorithm)
    networks, _ = build(given, algorithm)
    made = Updater(networks, algorithm, given.trainer, total_steps=3, pad_id=0)
    return networks.policy, made


def two_steps(folder: Path, *, compiled: bool, lora: bool) -> dict[str, Any]:
    """Take a step, continue from its checkpoint with a new updater, and take another."""
    first = updater(compiled=compiled, lora=lora)[1]
    losses = [first.step(rows_of_a_step()).metrics["train/loss"]]
    checkpoints = Checkpoints(folder, keep=config().trainer.keep_checkpoints)
    checkpoints.write(1, state=first.state(), facts={})
    checkpoints.wait()
    policy, second = updater(compiled=compiled, lora=lora)
    second.load(checkpoints.read(1)[0])
    losses.append(second.step(rows_of_a_step()).metrics["train/loss"])
    return {"losses": losses, "weights": state_of(policy)}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")  # those of torch about itself
@pytest.mark.parametrize("lora", [False, True])
def test_compiled_steps_equal_others_and_are_resumed(tmp_path: Path, *, lora: bool) -> None:
    plain = two_steps(tmp_path / "plain", compiled=False, lora=lora)
    compiled = two_steps(tmp_path / "compiled", compiled=True, lora=lora)
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-4, abs=1e-6)
    assert compiled["weights"].keys() == plain["weights"].keys()
    for name, weights in plain["weights"].items():
        torch.testing.assert_close(compiled["weights"][name], weights, atol=2e-4, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's own import
def test_layers_are_compiled_where_they_are() -> None:
    policy, _ = updater(compiled=True, lora=False)
    layers = [m for m in policy.modules() if m._compiled_call_impl is not None]
    assert [type(layer).__name__ for layer in layers] == ["Qwen3DecoderLayer"]
    assert not [name for name in policy.state_dict() if "_orig_mod" in name]


def test_without_a_compiler_nothing_is_compiled() -> None:
    policy, _ = updater(compiled=False, lora=False)
    settings = import_module("torch._inductor.config")
    missing = settings.patch({"cpp.cxx": ("/no/such/compiler",)})
    with missing, pytest.raises(ConfigError, match=r"`trainer.compile` is true, and no C\+\+"):
        compile_layers(policy)

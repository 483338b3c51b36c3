"""What is kept in CPU memory changes no number, and what cannot be kept there is refused."""

import weakref
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.tiny_models import networks, weights
from support.updates import rows_of_a_step

from rlake.loop.algorithms import resolve
from rlake.loop.config import OffloadConfig, TrainerConfig
from rlake.loop.trainer.checkpoint_io import apart
from rlake.loop.trainer.networks import checkpoint_activations
from rlake.loop.trainer.offload import activations_on_cpu, check_offload
from rlake.loop.trainer.step import Updater
from rlake.store.errors import ConfigError

OFFLOADED = {"optimizer": True, "activations": True}


def updater(device: str = "cpu", **trainer: Any) -> tuple[torch.nn.Module, Updater]:
    algorithm = resolve("ppo")  # it has a critic too
    made = networks(algorithm)
    for network in made.trained.values():
        network.to(device)
    given = {"learning_rate": 1e-2, "weight_decay": 0.1, "micro_batch_tokens": 60} | trainer
    settings = TrainerConfig.model_validate(given)
    if settings.gradient_checkpointing:
        checkpoint_activations(made.policy)
    return made.policy, Updater(made, algorithm, settings, total_steps=9, pad_id=0)


def after_three_steps(**trainer: Any) -> torch.Tensor:
    """The weights after two steps, and a third of another updater that continues from them."""
    first = updater(**trainer)[1]
    for _ in range(2):
        first.step(rows_of_a_step())
    policy, second = updater(**trainer)
    second.load(first.state())
    second.step(rows_of_a_step())
    return weights(policy)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
@pytest.mark.parametrize("again", [False, True])
def test_an_offloaded_step_is_the_same_to_the_last_bit(optimizer: str, *, again: bool) -> None:
    how = {"optimizer": optimizer, "gradient_checkpointing": again}
    plain = after_three_steps(**how)
    assert torch.equal(after_three_steps(offload=OFFLOADED, **how), plain)
    assert not torch.equal(plain, weights(updater()[0]))


def test_a_state_continues_with_and_without_offload() -> None:
    first = updater(offload=OFFLOADED)[1]
    first.step(rows_of_a_step())
    found = []
    for offload in ({}, OFFLOADED):
        policy, second = updater(offload=offload)
        second.load(deepcopy(first.state()))
        second.step(rows_of_a_step())
        found.append(weights(policy))
    assert torch.equal(*found)


def test_gradients_are_freed_and_parameters_are_copied() -> None:
    policy, ours = updater(offload=OFFLOADED)
    ours.step(rows_of_a_step())
    assert all(p.grad is None for p in policy.parameters())
    own = {p.data_ptr() for p in policy.parameters()}
    updated = [p for name, p in ours.like.items() if name.startswith("optimizers/policy")]
    assert len(updated) == len(own)
    assert not own & {p.data_ptr() for p in updated}


def test_activations_are_freed_with_the_loss() -> None:
    weight = torch.ones(9, requires_grad=True)
    with activations_on_cpu(OffloadConfig(activations=True)):
        # softmax keeps its own output for the backward pass
        probability = weight.softmax(-1)
    probability.square().sum().backward()
    kept = weakref.ref(probability)
    del probability
    assert kept() is None


def test_an_optimizer_with_a_state_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`Adagrad` has a state before its first step"):
        updater(optimizer="torch.optim:Adagrad", offload={"optimizer": True})


def test_what_one_process_or_several_cannot_offload_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match="one process needs all of its parameters"):
        check_offload(OffloadConfig(parameters=True), cpu, processes=1)
    with pytest.raises(ConfigError, match="2 processes offload the optimizer together with"):
        check_offload(OffloadConfig(optimizer=True), cpu, processes=2)
    check_offload(OffloadConfig(), cpu, processes=1)
    check_offload(OffloadConfig(optimizer=True), torch.device("cuda"), processes=1)
    assert not caplog.records
    check_offload(OffloadConfig(optimizer=True, activations=True), cpu, processes=1)
    assert caplog.messages == [
        "the model is on the CPU, so no memory is saved by `trainer.offload.optimizer` and "
        "`trainer.offload.activations`"
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_holds_less_and_steps_as_without() -> None:
    found, peaks = [], []
    for offload in ({}, OFFLOADED):
        torch.cuda.reset_peak_memory_stats()
        policy, ours = updater("cuda", offload=offload, precision="float32")
        ours.step(rows_of_a_step())
        found.append(weights(policy).cpu())
        peaks.append(torch.cuda.memory_allocated())
        state, _ = apart(ours.state()["optimizers"])
        kinds = {tensor.device.type for tensor in state.values() if tensor.ndim}
        assert kinds == ({"cpu"} if offload else {"cuda"})
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)
    assert peaks[1] < peaks[0]

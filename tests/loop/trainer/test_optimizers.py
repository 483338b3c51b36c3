"""Optimizers and schedules by name: whose steps they take, on what, and going on from a state."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from support.tiny_models import tiny, weights
from torch import nn
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from rlake.loop.config import KeepConfig, TrainerConfig
from rlake.loop.config.trainer import LrSchedule
from rlake.loop.models.value_heads import Critic
from rlake.loop.trainer.checkpoints import Checkpoints
from rlake.loop.trainer.optimizers import Optimizers
from rlake.store.errors import ConfigError

OURS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2, weight_decay=0.1),
    "torch.optim:NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.1),
}


def made(
    optimizer: str = "adamw", *, network: nn.Module | None = None, **trainer: Any
) -> tuple[nn.Module, Optimizers]:
    network = tiny()[0] if network is None else network
    given = {"learning_rate": 1e-2, "weight_decay": 0.1, "optimizer": optimizer} | trainer
    settings = TrainerConfig.model_validate(given)
    return network, Optimizers({"policy": network}, settings, total_steps=10)


def gradient_of(network: nn.Module, step: int) -> None:
    """Give a network the gradient of a step."""
    torch.manual_seed(step)
    for parameter in network.parameters():
        parameter.grad = torch.randn_like(parameter)


def assert_same_steps(optimizer: str, theirs: Callable[[nn.Module], Sequence[Any]]) -> Optimizers:
    """Take three steps with ours and with theirs, and compare the weights."""
    (one, ours), (other, _) = made(optimizer), tiny()
    both = [(one, [ours]), (other, theirs(other))]
    for step in range(3):
        for network, optimizers in both:
            gradient_of(network, step)
            for each in optimizers:
                each.step()
    torch.testing.assert_close(weights(one), weights(other), rtol=1e-5, atol=1e-7)
    return ours


@pytest.mark.parametrize("name", OURS)
def test_a_step_is_that_of_the_optimizer_named(name: str) -> None:
    assert_same_steps(name, lambda other: [OURS[name](other.parameters())])


def test_muon_takes_the_matrices_between_and_adamw_the_rest() -> None:
    def theirs(other: nn.Module) -> list[torch.optim.Optimizer]:
        inner = [p for n, p in other.named_parameters() if p.ndim == 2 and "embed" not in n]
        rest = [p for n, p in other.named_parameters() if p.ndim != 2 or "embed" in n]
        assert len(inner) == 7
        return [
            torch.optim.Muon(inner, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1),
        ]

    ours = assert_same_steps("muon", theirs)
    assert ours.rates() == {"learning_rate": 1e-2}


@pytest.mark.parametrize("name", [*OURS, "muon", "transformers.optimization:Adafactor"])
def test_going_on_from_a_state_is_going_on_bit_for_bit(name: str) -> None:
    own = {"relative_step": False, "scale_parameter": False} if name.startswith("transf") else {}
    options = {"lr_scheduler": {"name": "polynomial", "warmup_steps": 2}, "optimizer_kwargs": own}
    one, whole = made(name, **options)
    for step in range(3):
        gradient_of(one, step)
        whole.step()
        whole.advance()
    two, resumed = made(name, **options)
    two.load_state_dict(one.state_dict())
    resumed.load_state_dict(deepcopy(whole.state_dict()))
    for step in range(3, 6):
        for network, optimizers in ((one, whole), (two, resumed)):
            gradient_of(network, step)
            optimizers.step()
            optimizers.advance()
        assert whole.rates() == resumed.rates()
    assert torch.equal(weights(one), weights(two))


def test_norms_and_biases_may_keep_what_they_are() -> None:
    for which, held in (("all", 0), ("matrices", 5)):
        network, ours = made(weight_decay_params=which)
        before = {n: p.detach().clone() for n, p in network.named_parameters()}
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        ours.step()
        same = [n for n, p in network.named_parameters() if torch.equal(p, before[n])]
        assert len(same) == held
        assert all("norm" in name for name in same)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_network_has_a_learning_rate_of_its_own(optimizer: str) -> None:
    given = {"optimizer": optimizer, "learning_rate": 1e-2, "critic": {"learning_rate": 1e-3}}
    settings = TrainerConfig.model_validate(given)
    networks = {"policy": tiny()[0], "critic": Critic(tiny()[0])}
    ours = Optimizers(networks, settings, total_steps=3)
    assert ours.rates() == {"learning_rate": 1e-2, "critic_learning_rate": 1e-3}


SCHEDULES = sorted(set(get_args(LrSchedule)) - {"constant", "linear", "cosine"})


@pytest.mark.parametrize("decay", SCHEDULES)
def test_a_schedule_is_that_of_transformers(decay: str) -> None:
    options: dict[str, Any] = {"min_lr_rate": 0.1} if "min_lr" in decay else {}
    if decay == "warmup_stable_decay":
        options = {"num_decay_steps": 4}
    _, ours = made(lr_scheduler={"name": decay, "warmup_steps": 2, "kwargs": options})
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-2)
    theirs = get_scheduler(decay, plain, 2, 10, options)
    seen = []
    for _ in range(10):
        assert ours.rates()["learning_rate"] == theirs.get_last_lr()[0]
        seen.append(theirs.get_last_lr()[0])
        ours.step()
        ours.advance()
        plain.step()
        theirs.step()
    assert len(set(seen)) > 3


def test_all_schedules_that_can_be_named_are_known_to_transformers() -> None:
    assert set(get_args(LrSchedule)) <= {kind.value for kind in SchedulerType}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": "sgd", "optimizer_kwargs": {"momentun": 0.9}}, "do not fit `sgd`: .*mome"),
        ({"optimizer": "torch.optim:Nobody"}, "no optimizer `torch.optim:Nobody`"),
        ({"optimizer": "torch.nn:Linear"}, "must be a class of torch.optim.Optimizer"),
        (
            {"lr_scheduler": {"name": "polynomial", "kwargs": {"powers": 2}}},
            "`trainer.lr_scheduler.kwargs` do not fit `polynomial`: .*powers",
        ),
    ],
)
def test_what_an_optimizer_does_not_take_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(**given)


def test_an_optimizer_nobody_knows_is_refused_before_work() -> None:
    with pytest.raises(ValueError, match="optimizer"):
        TrainerConfig.model_validate({"optimizer": "adamm"})


@pytest.mark.skipif(find_spec("torchao") is not None, reason="is about a missing package")
def test_the_8_bit_optimizer_says_what_it_needs() -> None:
    message = r"`adamw_8bit` is of the package torchao, which is not installed; `pip install"
    with pytest.raises(ConfigError, match=message):
        made("adamw_8bit")


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")  # those of torch about itself
@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
def test_the_8_bit_optimizer_continues_to_the_last_bit(tmp_path: Path) -> None:
    found = []
    for is_resumed in (False, True):
        network, ours = made("adamw_8bit", network=tiny(hidden_size=64)[0])
        for step in range(3):
            gradient_of(network, step)
            ours.step()
            if is_resumed and step == 1:
                checkpoints = Checkpoints(tmp_path, keep=KeepConfig())
                checkpoints.write(1, state=ours.state_dict(), facts={})
                checkpoints.wait()
                ours = made("adamw_8bit", network=network)[1]
                ours.load_state_dict(checkpoints.read(1)[0])
        found.append(weights(network))
    assert torch.equal(*found)
    assert not torch.equal(found[0], weights(tiny(hidden_size=64)[0]))

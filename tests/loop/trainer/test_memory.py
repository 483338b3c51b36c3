"""Fewer bits, less kept in memory, and what is said when memory does not suffice."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import polars as pl
import pytest
import torch
from support.builders import rows
from support.tiny_models import config, networks, tiny, written
from support.updates import rows_of_a_step, step
from torch.utils._python_dispatch import TorchDispatchMode

from rlake.loop.algorithms import names, resolve
from rlake.loop.config import TrainerConfig
from rlake.loop.losses import Algorithm, Loss
from rlake.loop.losses.batch import Batch, Examples, examples, untrainable
from rlake.loop.models.token_logprobs import Scorer
from rlake.loop.trainer.networks import Networks, build
from rlake.loop.trainer.step import Updater
from rlake.store.errors import JobError


def ready() -> Examples:
    frame = rows(written(4, response=[3, 9, 5, 7]))
    return examples(frame.with_columns(advantage=pl.lit(1.0), weight=pl.lit(1.0)))


def optimization(algorithm: Any, trained: Networks, **trainer: Any) -> Updater:
    settings = TrainerConfig.model_validate({"learning_rate": 1e-2} | trainer)
    return Updater(trained, algorithm, settings, total_steps=9, temperature=1.0, pad_id=0)


def note(seen: set[torch.dtype], layer: object, args: object, out: torch.Tensor) -> None:
    """Note the kind of numbers that a layer gives."""
    del layer, args
    seen.add(out.dtype)


def test_bfloat16_is_of_what_is_worked_out_and_never_of_weights_or_losses() -> None:
    found = {}
    for precision in ("float32", "bfloat16", "auto"):
        made = resolve("ppo")
        trained = networks(made)
        assert trained.scorer.packs
        seen: set[torch.dtype] = set()
        layer = trained.policy.get_submodule("model.layers.0.mlp.down_proj")
        layer.register_forward_hook(partial(note, seen))
        ours = optimization(made, trained, precision=precision)
        stepped = ours.step(ready())
        found[precision] = stepped.metrics["train/loss"]
        assert seen == {torch.bfloat16 if precision == "bfloat16" else torch.float32}
        for network in trained.trained.values():
            assert {p.dtype for p in network.parameters()} == {torch.float32}
            assert {p.grad.dtype for p in network.parameters() if p.grad is not None} == {
                torch.float32
            }
    assert found["auto"] == found["float32"]  # no GPU here
    assert found["bfloat16"] != found["float32"]
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=0.1, abs=0.05)


@dataclass
class Logits(TorchDispatchMode):
    """Notes the bytes of the largest tensor over a vocabulary, the weights of a head left out."""

    vocabulary: int
    hidden_size: int
    largest: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else [out]:
            if isinstance(made, torch.Tensor) and made.ndim > 1:
                *rows, last = made.shape
                if last == self.vocabulary and rows != [self.hidden_size]:
                    self.largest = max(self.largest, made.nbytes)
        return out


WIDER: dict[str, Any] = {
    "gspo": {"gspo": {"clip": 0.3, "clip_high": 0.3}},
    "m2po": {"m2po": {"threshold": 100.0}},
}
"""Which rows GSPO's range of 4e-4 clips, and which tokens M2PO leaves out, differs in bfloat16."""


@pytest.mark.parametrize("algorithm", [WIDER.get(name, name) for name in names()], ids=names())
def test_every_algorithm_learns_in_bfloat16_and_its_logits_stay_within_their_bytes(
    algorithm: Any,
) -> None:
    given, bound = rows_of_a_step(), 15 * 4 * 4 * 5  # of 15 tokens in float32: 4 chunks of 5
    model, tokenizer = tiny()
    if "teacher_logprobs" in resolve(algorithm).needs:  # asked of the teacher, not stored
        given = replace(
            given, tokens={k: v for k, v in given.tokens.items() if k != "teacher_logprobs"}
        )
    found = {}
    for precision in ("float32", "bfloat16"):
        with Logits(len(tokenizer), model.config.hidden_size) as seen:
            found[precision] = step(algorithm, given, precision=precision, max_logits_bytes=bound)
        assert seen.largest <= bound, precision
        assert (seen.largest > 0) == (resolve(algorithm).network != "reward_model")
    whole, half = found["float32"], found["bfloat16"]
    assert all(math.isfinite(value) for value in half.measured.values())
    assert torch.isfinite(half.weights).all()
    assert half.measured["train/loss"] == pytest.approx(
        whole.measured["train/loss"], rel=0.1, abs=0.05
    )
    cosine = torch.nn.functional.cosine_similarity(half.gradient, whole.gradient, dim=0)
    assert float(cosine) > 0.9, float(cosine)


def test_log_probs_in_bfloat16_are_near_and_have_the_gradient_of_float32() -> None:
    model, _ = tiny()
    torch.manual_seed(0)
    token_ids, mask = torch.randint(3, 15, (4, 20)), torch.ones(4, 20)
    found, slopes = [], []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            said = Scorer(model, packing=True)(token_ids, mask, statistics=["logprobs", "entropy"])
        assert {value.dtype for value in said.values()} == {torch.float32}
        model.zero_grad()
        sum(value.sum() for value in said.values()).backward()  # type: ignore[union-attr]
        found.append(said["logprobs"].detach())
        slopes.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
    assert 0 < float((found[0] - found[1]).abs().max()) < 0.1
    assert float(torch.nn.functional.cosine_similarity(slopes[0], slopes[1], dim=0)) > 0.999


@dataclass(frozen=True, kw_only=True)
class Greedy(Algorithm):
    """An algorithm that wants more memory than there is."""

    def loss(self, batch: Batch, logprobs_BT: torch.Tensor) -> Loss:
        return Loss(logprobs_BT.sum() + torch.zeros(1 << 55).sum(), {})


def test_a_step_that_runs_out_of_memory_says_what_to_lower() -> None:
    made = Greedy()
    ours = optimization(made, networks(made), micro_batch_tokens=123, max_logits_bytes=4567)
    with pytest.raises(JobError) as caught:
        ours.step(ready())
    told = str(caught.value)
    assert "a training step ran out of memory" in told
    assert "lower `trainer.micro_batch_tokens` (now 123)" in told
    assert "`trainer.max_logits_bytes` (now 4567)" in told
    assert "or set `trainer.gradient_checkpointing`" in told


def test_other_errors_of_a_step_are_not_taken_for_memory() -> None:
    class Wrong(Greedy):
        def loss(self, batch: Batch, logprobs_BT: torch.Tensor) -> Loss:
            raise RuntimeError("sizes do not fit")

    ours = optimization(Wrong(), networks(Wrong()))
    with pytest.raises(RuntimeError, match="sizes do not fit"):
        ours.step(ready())


def test_what_is_configured_reaches_the_networks() -> None:
    given = config(
        algorithm="ppo",
        trainer={"packing": False, "max_logits_bytes": 1000, "gradient_checkpointing": True},
    )
    trained, _ = build(given, resolve("ppo"))
    assert not trained.scorer.packs
    assert trained.scorer.max_logits_bytes == 1000
    assert all(
        any(getattr(m, "gradient_checkpointing", False) for m in network.modules())
        for network in trained.trained.values()
    )
    trained, _ = build(config(), resolve("grpo"))
    assert trained.scorer.packs


def test_gradient_checkpointing_changes_no_number() -> None:
    losses = []
    for again in (False, True):
        given = config(trainer={"gradient_checkpointing": again, "learning_rate": 1e-2})
        made = resolve("sft")
        trained, _ = build(given, made)
        ours = Updater(trained, made, given.trainer, total_steps=9, temperature=1.0, pad_id=0)
        losses.append([ours.step(ready()).metrics["train/loss"] for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_rows_that_a_model_cannot_read_are_not_trainable() -> None:
    frame = pl.DataFrame(
        {"token_ids": [[3, 4], [3, 40], [3, -1], [3] * 9, [], None]},
        schema={"token_ids": pl.List(pl.Int32)},
    ).with_columns(loss_mask=pl.col("token_ids").list.eval(pl.lit(value=True)))
    assert untrainable(frame, vocabulary=40, max_length=8).is_null().to_list()[:4] == [
        True,
        False,
        False,
        False,
    ]

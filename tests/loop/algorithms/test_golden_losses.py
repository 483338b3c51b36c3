"""Losses against numbers that others publish, and against TRL's own loss on a real model."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.losses import batch_of
from support.tiny_models import gradients, tiny
from transformers import PreTrainedModel

from rlake.loop.algorithms import resolve
from rlake.loop.losses import Algorithm, Loss
from rlake.loop.losses.batch import Examples
from rlake.loop.models.token_logprobs import Scorer
from rlake.loop.trainer.step import scored

SHAPE = (5, 20)


def golden() -> tuple[Examples, torch.Tensor]:
    """The tensors of Trinity-RFT's tests/algorithm/policy_loss_test.py, drawn in their order."""
    torch.manual_seed(42)
    new_BT = 2 * torch.rand(SHAPE) - 1
    old_BT = 2 * torch.rand(SHAPE) - 1
    torch.rand(SHAPE)  # a reference policy's, for losses that are not here
    mask_BT = torch.rand(SHAPE) > 0.5
    advantage_BT = 2 * torch.rand(SHAPE) - 1
    is_expert_B = torch.rand(SHAPE[0]) > 0.5
    columns = {"logprobs": old_BT, "mask": mask_BT.float(), "advantage": advantage_BT}
    rows = {"advantage": torch.zeros(5), "weight": torch.ones(5), "is_expert": is_expert_B.float()}
    made = Examples(
        [f"e{i}" for i in range(5)],
        torch.full((5,), SHAPE[1]),
        {
            "token_ids": torch.zeros(100, dtype=torch.long),
            **{name: value.flatten() for name, value in columns.items()},
        },
        rows,
        torch.arange(5),
    )
    return made, new_BT


def loss_of(algorithm: Algorithm) -> Loss:
    rows, new_BT = golden()
    return algorithm.loss(batch_of(algorithm.prepare(rows)), new_BT)


GOLDEN: list[tuple[dict[str, dict[str, Any]], float]] = [
    ({"grpo": {"aggregation": "token-mean"}}, 0.28560468554496765),
    ({"dapo": {"clip_high": 0.2}}, 0.28560468554496765),
    # they cut the ratio at 2 where the advantage is negative, which is what a dual clip does
    ({"grpo": {"aggregation": "token-mean", "dual_clip": 2.0}}, 0.2230827361345291),
    ({"gspo": {}}, 0.27235108613967896),
    ({"sft": {}}, -0.07560186833143234),
    ({"opmd": {"aggregation": "token-mean"}}, -0.009589947760105133),
]


@pytest.mark.parametrize(("algorithm", "expected"), GOLDEN, ids=[str(g[0]) for g in GOLDEN])
def test_losses_have_the_published_values(
    algorithm: dict[str, dict[str, Any]], expected: float
) -> None:
    assert loss_of(resolve(algorithm)).value.item() == pytest.approx(expected, rel=2e-6)


def test_measurements_have_the_published_values() -> None:
    found = loss_of(resolve({"grpo": {"aggregation": "token-mean"}})).metrics
    assert found["clip_fraction"].item() == pytest.approx(0.3541666567325592, rel=1e-6)


def test_a_mixture_has_the_published_parts_without_the_number_of_rows_in_them() -> None:
    """They report 2 x the policy's part and 3 x the expert's, and 0.6582 for both.

    There the means are multiplied by the rows of each kind, 2 and 3 here, over batch sizes that
    their configuration must repeat and that are 1 in their test.
    """
    loss = loss_of(resolve("mix"))
    assert 2 * loss.metrics["policy_loss"].item() == pytest.approx(0.7236452102661133, rel=2e-6)
    assert 3 * loss.metrics["nll"].item() == pytest.approx(0.06915830634534359, rel=2e-6)
    parts = 0.9 * 0.7236452102661133 / 2 + 0.1 * 0.06915830634534359 / 3
    assert loss.value.item() == pytest.approx(parts, rel=2e-6)


# TRL

PROMPT, MOST = 3, 8
LENGTHS = torch.tensor([8, 5, 3, 8, 2, 6])


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A GRPOTrainer on a tiny model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield make_trainer(tmp_path_factory.mktemp("trl"))


def make_trainer(folder: Path) -> Any:
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    model, tokenizer = tiny()
    config = GRPOConfig(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=MOST,
        temperature=0.8,
        vllm_importance_sampling_correction=False,
    )
    made = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["1+1="] * 2}),
        processing_class=tokenizer,
    )
    made.current_gradient_accumulation_steps = 1
    return made


def completions(vocabulary: int) -> dict[str, torch.Tensor]:
    """Ragged completions as TRL wants them, near enough to the model that some are not clipped."""
    random = torch.Generator().manual_seed(3)
    mask = (torch.arange(MOST) < LENGTHS[:, None]).long()
    shape = (len(LENGTHS), MOST)
    return {
        "prompt_ids": torch.randint(3, vocabulary, (len(LENGTHS), PROMPT), generator=random),
        "prompt_mask": torch.ones(len(LENGTHS), PROMPT, dtype=torch.long),
        "completion_ids": torch.randint(3, vocabulary, shape, generator=random),
        "completion_mask": mask,
        "advantages": torch.randn(len(LENGTHS), generator=random),
        "num_items_in_batch": mask.sum(),
        "noise": torch.randn(shape, generator=random) * 0.3,
    }


def ours(made: dict[str, torch.Tensor]) -> Examples:
    """The same rows without padding."""
    lengths = PROMPT + LENGTHS
    keep = torch.nn.functional.pad(made["completion_mask"], (PROMPT, 0), value=1) > 0
    token_ids = torch.cat([made["prompt_ids"], made["completion_ids"]], 1)
    mask = torch.nn.functional.pad(made["completion_mask"], (PROMPT, 0)).float()
    old = torch.nn.functional.pad(made["old_per_token_logps"], (PROMPT, 0))
    return Examples(
        [f"e{i}" for i in range(len(lengths))],
        lengths,
        {"token_ids": token_ids[keep], "mask": mask[keep], "logprobs": old[keep]},
        {"advantage": made["advantages"], "weight": torch.ones(len(lengths))},
        torch.arange(len(lengths)),
    )


def both(trainer: Any, algorithm: Algorithm) -> tuple[float, torch.Tensor, float, torch.Tensor]:
    """TRL's loss and gradient, then ours, of the same model on the same rows."""
    model: PreTrainedModel = trainer.model.train()
    made = completions(model.config.vocab_size)
    with torch.no_grad():
        token_ids = torch.cat([made["prompt_ids"], made["completion_ids"]], 1)
        said, *_ = trainer._get_per_token_logps_and_entropies(
            model, token_ids, torch.ones_like(token_ids), MOST
        )
    made["old_per_token_logps"] = said + made.pop("noise")
    model.zero_grad()
    theirs = trainer._compute_loss(model, made)
    theirs.backward()
    gradient = gradients(model)
    model.zero_grad()
    rows = algorithm.prepare(ours(made))
    batch = rows.padded(range(len(rows)), totals=rows.totals, pad_id=0)
    found = scored(Scorer(model), batch, temperature=0.8)["logprobs"]
    loss = algorithm.loss(batch, found).value
    loss.backward()
    return theirs.item(), gradient, loss.item(), gradients(model)


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("grpo", {}, {"loss_type": "grpo"}),
    ("grpo", {"clip_high": 0.3}, {"loss_type": "grpo", "epsilon_high": 0.3}),
    ("grpo", {"aggregation": "token-mean"}, {"loss_type": "bnpo"}),
    ("grpo", {"sequence_mask": 0.05}, {"loss_type": "grpo", "off_policy_mask_threshold": 0.05}),
    ("grpo", {"dual_clip": 1.3}, {"loss_type": "grpo", "delta": 1.3}),
    ("dapo", {}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    ("dr_grpo", {"aggregation": "seq-mean-token-sum-norm", "norm": MOST}, {"loss_type": "dr_grpo"}),
    (
        "gspo",
        {"clip": 0.01, "clip_high": 0.02},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.01,
            "epsilon_high": 0.02,
        },
    ),
    ("cispo", {"clip_high": 0.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
    ("sapo", {}, {"loss_type": "sapo"}),
    ("sapo", {"tau_negative": 3.0}, {"loss_type": "sapo", "sapo_temperature_neg": 3.0}),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "params", "options"), CASES, ids=[str(c[:2]) for c in CASES])
def test_loss_and_gradient_are_those_of_trl(
    trainer: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    params: dict[str, Any],
    options: dict[str, Any],
) -> None:
    for option, value in options.items():
        holder = trainer if hasattr(trainer, option) else trainer.args
        monkeypatch.setattr(holder, option, value)
    theirs, gradient, own, own_gradient = both(trainer, resolve({name: params}))
    assert abs(theirs) > 1e-3
    assert own == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert float(gradient.abs().max()) > 1e-3
    furthest = (own_gradient - gradient).abs().max() / gradient.abs().max()
    assert float(furthest) < 1e-5

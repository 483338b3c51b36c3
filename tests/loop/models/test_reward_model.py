"""Reward models: their loss, what they score, and how others load what was trained."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.losses import batch_of, examples_of, ragged
from support.preferences import prefer, preference
from support.tiny_models import SPEC, judge, metric, offline, table, tiny, written

from rlake.loop.algorithms import resolve
from rlake.loop.config import FrozenModel
from rlake.loop.models.value_heads import SequenceScorer, load_reward_model, of_policy
from rlake.loop.run import run
from rlake.loop.runs.job import run_folder
from rlake.store import Store, connect
from rlake.store.errors import ConfigError


def expected(
    scores: np.ndarray, weight: np.ndarray, margin: np.ndarray, *, center: float
) -> tuple[float, np.ndarray]:
    """Equation 1 of arXiv:2203.02155 with the margin of arXiv:2307.09288, and its gradient."""
    loss, gradient, pairs = 0.0, np.zeros(len(scores)), len(scores) // 2
    for i in range(0, len(scores), 2):
        better, worse = scores[i], scores[i + 1]
        p = 1 / (1 + math.exp(-(better - worse - margin[i])))
        loss += weight[i] / pairs * (-math.log(p) + center * (better + worse) ** 2)
        slope, pull = p - 1, 2 * center * (better + worse)
        gradient[i] = weight[i] / pairs * (slope + pull)
        gradient[i + 1] = weight[i] / pairs * (-slope + pull)
    return loss, gradient


@pytest.mark.parametrize(("margin_coef", "center_coef"), [(0.0, 0.0), (0.5, 0.0), (1.0, 0.01)])
def test_the_loss_of_scores_and_its_gradient_are_those_of_the_papers(
    margin_coef: float, center_coef: float
) -> None:
    for seed in range(4):
        rows, rng = ragged(seed, pairs=True), np.random.default_rng(seed)
        margin = np.repeat(rng.uniform(0, 2, len(rows) // 2), 2)
        margin[:2] = math.nan
        scores_B = torch.tensor(rng.normal(0, 2, len(rows)), requires_grad=True)
        batch = batch_of(examples_of(rows))
        batch = batch.with_rows(scores=scores_B, margin=torch.tensor(margin))
        spec = {"margin_coef": margin_coef, "center_coef": center_coef}
        loss = resolve({"reward_model": spec}).loss(batch, torch.zeros(len(rows), 1))
        loss.value.backward()
        values = scores_B.detach().numpy()
        asked = margin_coef * np.nan_to_num(margin)
        value, gradient = expected(values, rows.weight, asked, center=center_coef)
        assert loss.value.item() == pytest.approx(value, rel=1e-12)
        assert scores_B.grad is not None
        np.testing.assert_allclose(scores_B.grad.numpy(), gradient, rtol=1e-10)
        ahead = values[0::2] - values[1::2]
        assert loss.metrics["accuracy"].item() == (ahead > 0).mean()
        assert loss.metrics["reward_margin"].item() == pytest.approx(ahead.mean(), rel=1e-12)


def test_a_score_is_read_at_the_last_trained_token_as_transformers_reads_it() -> None:
    policy, tokenizer = tiny()
    model = judge(policy, tokenizer)
    token_ids = torch.tensor([[5, 6, 7, 8, 0, 0], [9, 4, 5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]]).float()
    scores = SequenceScorer(model)(token_ids, mask)
    theirs = model(input_ids=token_ids, attention_mask=(token_ids > 0).long()).logits[:, 0]
    torch.testing.assert_close(scores, theirs)
    alone = SequenceScorer(model)(token_ids[:1, :4], mask[:1, :4])
    torch.testing.assert_close(scores[:1], alone)
    behind = torch.tensor([[5, 6, 7, 8, 11, 12]])
    torch.testing.assert_close(SequenceScorer(model)(behind, mask[:1]), alone)


def test_a_fresh_reward_model_gives_everything_the_same_score() -> None:
    policy, tokenizer = tiny()
    model = of_policy(policy, tokenizer)
    scores = SequenceScorer(model)(torch.tensor([[5, 6, 7]]), torch.ones(1, 3))
    assert scores.tolist() == [0.0]
    assert (
        sum(p.numel() for p in model.parameters())
        == sum(p.numel() for p in policy.parameters()) + SPEC["hidden_size"]
    )


def graded(store: Store, n: int = 40) -> None:
    """Store pairs whose chosen rows have more ones (token 4) than the rejected."""
    rng = np.random.default_rng(0)
    rows = written(2 * n, response=4)
    for i, row in enumerate(rows):
        answer = rng.integers(5, 12, 4)
        answer[: 1 + i % 2] = 4
        tokens = [3 + i // 2 % 10, 13, *rng.permutation(answer).tolist()]
        rows[i] = replace(row, token_ids=tokens)
    store.append("experiences", rows)
    ids = [str(row.experience_id) for row in rows]
    pairs = [preference(ids[i + 1], ids[i], margin=float(i)) for i in range(0, 2 * n, 2)]
    store.append("preferences", pairs)


def configured(**trainer: Any) -> Any:
    settings = {"batch_size": 10, "learning_rate": 3e-3, **trainer}
    return offline(algorithm="reward_model", trainer=settings)


def weights(store: Store, version: int) -> Path:
    [path] = table(store, f"policies_current WHERE policy_version = {version}", "path")["path"]
    return run_folder(store, configured()) / path


def test_a_reward_model_learns_to_rank_held_out_pairs_and_others_can_load_it(store: Store) -> None:
    from transformers import AutoModelForSequenceClassification

    graded(store)
    run(store, configured(max_uses=15, eval_where="margin < 20", lr_scheduler={"name": "linear"}))
    accuracy = metric(store, "eval/accuracy")
    steps = max(accuracy)
    assert accuracy[0] == 0.5
    assert accuracy[steps] > 0.85
    assert metric(store, "eval/loss")[steps] < math.log(2) - 0.2
    assert "eval/nll" not in set(table(store, "metrics", "name")["name"])
    folder = weights(store, steps)
    loaded = AutoModelForSequenceClassification.from_pretrained(folder)
    assert loaded.config.num_labels == 1
    ours, _ = load_reward_model(FrozenModel(path=str(folder)), seed=0)
    token_ids = torch.tensor([[5, 13, 4, 4, 6, 1]])
    mask = torch.tensor([[0.0, 0, 1, 1, 1, 1]])
    theirs = loaded(input_ids=token_ids).logits[:, 0]
    torch.testing.assert_close(SequenceScorer(ours)(token_ids, mask), theirs)


def test_a_killed_training_of_a_reward_model_goes_on_bit_for_bit(
    store: Store, empty_store: Path, tmp_path: Path
) -> None:
    killed = connect(shutil.copytree(empty_store, tmp_path / "killed"))
    for each in (store, killed):
        prefer(each, 6)

    def fail(job: str, step: int, _: object) -> None:
        if job == "train" and step == 3:
            raise KeyboardInterrupt

    config = configured(batch_size=2, max_uses=2, checkpoint_every=2)
    run(store, config)
    with pytest.raises(KeyboardInterrupt):
        run(killed, config, listener=fail)
    run(killed, config, resume=True)
    digests = [
        table(s, "policies_current WHERE policy_version = 6", "digest") for s in (store, killed)
    ]
    assert digests[0].height == 1
    assert digests[0].equals(digests[1])


def test_training_goes_on_from_a_stored_reward_model(store: Store) -> None:
    prefer(store, 4)
    run(store, configured(batch_size=2))
    stored = {"from_scratch": None, "path": str(weights(store, 2))}
    trainer = {"batch_size": 2, "learning_rate": 3e-3}
    again = offline(name="again", algorithm="reward_model", model=stored, trainer=trainer)
    run(store, again)
    first = store.sql(
        "SELECT value FROM metrics WHERE run_id = 'again' AND name = 'train/accuracy' AND step = 1"
    ).fetchall()
    assert first != [(0.5,)], "it has scores already"


def test_what_is_no_reward_model_is_refused(store: Store, tmp_path: Path) -> None:
    from transformers import Qwen3ForSequenceClassification

    policy, tokenizer = tiny()
    policy.config.num_labels = 3
    Qwen3ForSequenceClassification(policy.config).save_pretrained(tmp_path / "three")
    tokenizer.save_pretrained(tmp_path / "three")
    with pytest.raises(ConfigError, match="gives 3 numbers, expected one score"):
        load_reward_model(FrozenModel(path=str(tmp_path / "three")), seed=0)
    with pytest.raises(ConfigError, match="is not a model that can be loaded"):
        load_reward_model(FrozenModel(path=str(tmp_path / "nothing")), seed=0)
    prefer(store, 2)
    lora = {"lora": {}}
    with pytest.raises(ConfigError, match=r"`model\.lora` is for policies"):
        run(store, offline(algorithm="reward_model", model=lora))

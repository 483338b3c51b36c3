"""PPO against its papers, token by token in float64; and its critic in a run."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from support.builders import rows as frame_of
from support.losses import Rows, batch_of, examples_of, logprobs_of, ragged
from support.tiny_models import config, critic, networks, offline, table, weights, written

from rlake.loop.algorithms.a2c import A2C
from rlake.loop.algorithms.ppo import PPO
from rlake.loop.config import TrainerConfig
from rlake.loop.losses import KL
from rlake.loop.losses.batch import Batch, Examples, examples
from rlake.loop.losses.gae import earned, gae
from rlake.loop.models.value_heads import Critic
from rlake.loop.run import run
from rlake.loop.trainer.networks import build
from rlake.loop.trainer.step import Updater
from rlake.store import Store

GAMMA, LAM = 0.9, 0.8


def without(rows: Rows, *columns: str) -> Rows:
    """The same rows without some of their columns."""
    return replace(rows, tokens={k: v for k, v in rows.tokens.items() if k not in columns})


def expected_advantages(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Sums of (gamma lambda)^l delta_{t+l} (arXiv:1506.02438, equation 16), trained tokens only."""
    spots = np.flatnonzero(mask)
    out = np.zeros(len(mask))
    for k, spot in enumerate(spots):
        for later in range(k, len(spots)):
            following = values[spots[later + 1]] if later + 1 < len(spots) else 0.0
            error = rewards[later] + GAMMA * following - values[spots[later]]
            out[spot] += (GAMMA * LAM) ** (later - k) * error
    return out


def rewards_of(rows: Rows, i: int) -> np.ndarray:
    """What each trained token of a row earned: what stands from it to the next one."""
    spots = np.flatnonzero(rows.mask[i])
    if "token_rewards" not in rows.tokens:
        return np.array([0.0] * (len(spots) - 1) + [rows.rows["reward"][i]])
    ends = [*spots[1:], len(rows.mask[i])]
    given = rows.tokens["token_rewards"][i]
    return np.array([given[a:b].sum() for a, b in zip(spots, ends, strict=True)])


@pytest.mark.parametrize("dropped", [(), ("token_rewards",)], ids=["a token", "a sequence"])
def test_advantages_are_those_of_the_paper_over_trained_tokens(dropped: tuple[str, ...]) -> None:
    for seed in range(5):
        rows = without(ragged(seed), *dropped)
        step = examples_of(rows)
        found = gae(step, earned(step), step.tokens["old_values"], gamma=GAMMA, lam=LAM)
        expected = [
            expected_advantages(rewards_of(rows, i), rows.tokens["old_values"][i], rows.mask[i])
            for i in range(len(rows))
        ]
        np.testing.assert_allclose(found.numpy(), np.concatenate(expected), rtol=1e-12, atol=1e-14)


def test_a_reward_before_the_first_trained_token_was_earned_by_none() -> None:
    rows = ragged(0, rows=2)
    rows.tokens["token_rewards"][1][:] = 0.0
    rows.tokens["token_rewards"][1][0] = 5.0  # the first token is never trained on
    assert not rows.mask[1][0]
    step = examples_of(rows)
    assert earned(step)[len(rows.mask[0]) :].abs().max() == 0
    assert float(earned(step).sum()) == pytest.approx(rewards_of(rows, 0).sum())


def test_rows_without_trained_tokens_earn_nothing() -> None:
    rows = ragged(1, rows=2)
    rows.mask[0][:] = False
    for chosen in (rows, without(rows, "token_rewards")):
        step = examples_of(chosen)
        assert earned(step)[: len(rows.mask[0])].abs().max() == 0
        assert earned(step)[len(rows.mask[0]) :].abs().max() > 0
    rows.mask[1][:] = False
    step = examples_of(rows)
    assert gae(step, earned(step), step.tokens["old_values"], gamma=1, lam=1).abs().max() == 0


def expected(rows: Rows, algorithm: PPO) -> dict[str, Any]:
    """The losses of arXiv:1707.06347, values clipped likewise, and gradients in closed form."""
    reach = algorithm.clip_value or math.inf
    credit, returns = [], []
    for i, mask in enumerate(rows.mask):
        old = rows.tokens["old_values"][i]
        credit.append(expected_advantages(rewards_of(rows, i), old, mask))
        returns.append(credit[-1] + old)
    trained = np.concatenate([c[m] for c, m in zip(credit, rows.mask, strict=True)])
    mean, deviation = trained.mean(), trained.std()
    policy = value = 0.0
    by_logprob = [np.zeros(len(n)) for n in rows.new]
    by_value = [np.zeros(len(n)) for n in rows.new]
    moved = 0
    for i, mask in enumerate(rows.mask):
        for t in np.flatnonzero(mask):
            share = rows.weight[i] / rows.num_tokens
            gain = (credit[i][t] - mean) / (deviation + 1e-8)
            ratio = math.exp(rows.new[i][t] - rows.old[i][t])
            bounded = min(max(ratio, 1 - algorithm.clip), 1 + algorithm.clip)
            policy -= share * min(ratio * gain, bounded * gain)
            if ratio * gain <= bounded * gain:
                by_logprob[i][t] = -share * ratio * gain
            old, new = rows.tokens["old_values"][i][t], rows.tokens["values"][i][t]
            near = old + min(max(new - old, -reach), reach)
            moved += abs(new - old) > reach
            free, held = (new - returns[i][t]) ** 2, (near - returns[i][t]) ** 2
            value += share * 0.5 * max(free, held)
            if abs(new - old) <= reach or free >= held:
                by_value[i][t] = share * (new - returns[i][t])
    old = np.concatenate([v[m] for v, m in zip(rows.tokens["old_values"], rows.mask, strict=True)])
    earned = np.concatenate([v[m] for v, m in zip(returns, rows.mask, strict=True)])
    return {
        "policy": policy,
        "value": value,
        "by_logprob": by_logprob,
        "by_value": by_value,
        "moved": moved / rows.num_tokens,
        "explained": 1 - (earned - old).var() / earned.var(),
    }


def in_training(rows: Rows, algorithm: PPO, *, more: int = 0) -> tuple[Batch, torch.Tensor]:
    """Prepared rows as a batch whose values have a gradient, and the policy's log-probs."""
    batch = batch_of(algorithm.prepare(examples_of(rows)), more=more)
    values_BT = batch.tokens["values"].clone().requires_grad_()
    return batch.with_tokens(values=values_BT), logprobs_of(rows, more=more)


def test_a2c_raises_log_probs_by_returns_less_values_and_learns_the_returns() -> None:
    """The gradients of arXiv:1602.01783 (section 4) in closed form; half the squared error."""
    algorithm = A2C(gamma=GAMMA, aggregation="token-mean", value_coef=0.7)
    for seed in range(5):
        rows = ragged(seed)
        loss_rows = algorithm.prepare(examples_of(rows))
        batch = batch_of(loss_rows, more=seed)
        values_BT = batch.tokens["values"].clone().requires_grad_()
        new_BT = logprobs_of(rows, more=seed)
        loss = algorithm.loss(batch.with_tokens(values=values_BT), new_BT)
        loss.value.backward()
        told = 0.0
        assert new_BT.grad is not None
        assert values_BT.grad is not None
        for i, mask in enumerate(rows.mask):
            earned_here = rewards_of(rows, i)
            for k, t in enumerate(np.flatnonzero(mask)):
                share = rows.weight[i] / rows.num_tokens
                following = sum(GAMMA**n * r for n, r in enumerate(earned_here[k:]))
                gain = following - rows.tokens["old_values"][i][t]
                error = rows.tokens["values"][i][t] - following
                told += share * (-gain * rows.new[i][t] + 0.7 * 0.5 * error**2)
                assert new_BT.grad[i, t].item() == pytest.approx(-share * gain, rel=1e-9)
                assert values_BT.grad[i, t].item() == pytest.approx(0.7 * share * error, rel=1e-9)
        assert loss.value.item() == pytest.approx(told, rel=1e-9)


@pytest.mark.parametrize("clip_value", [0.4, None])
def test_the_loss_and_its_gradients_are_those_of_the_papers(clip_value: float | None) -> None:
    algorithm = PPO(gamma=GAMMA, lam=LAM, clip_value=clip_value, value_coef=0.7)
    for seed in range(5):
        rows = ragged(seed)
        batch, new_BT = in_training(rows, algorithm, more=seed)
        loss = algorithm.loss(batch, new_BT)
        loss.value.backward()
        told = expected(rows, algorithm)
        assert loss.value.item() == pytest.approx(told["policy"] + 0.7 * told["value"], rel=1e-10)
        assert loss.metrics["value_loss"].item() == pytest.approx(told["value"], rel=1e-10)
        assert loss.metrics["explained_variance"].item() == pytest.approx(told["explained"])
        if clip_value is not None:
            assert loss.metrics["value_clip_fraction"].item() == pytest.approx(told["moved"])
            assert 0 < told["moved"] < 1
        value_BT = batch.tokens["values"]
        for i, row in enumerate(rows.new):
            assert new_BT.grad is not None
            assert value_BT.grad is not None
            found = new_BT.grad[i].numpy(), value_BT.grad[i].numpy()
            for grad, wanted in zip(
                found, (told["by_logprob"][i], 0.7 * told["by_value"][i]), strict=True
            ):
                np.testing.assert_allclose(grad[: len(row)], wanted, rtol=1e-9, atol=1e-14)
                assert not grad[len(row) :].any()


def test_the_divergence_is_taken_off_the_rewards_of_tokens() -> None:
    rows = without(ragged(3), "token_rewards")
    kl = KL(estimator="k1", coef=0.3, part_of="reward")
    algorithm = PPO(gamma=1.0, lam=1.0, whiten=False, kl=kl)
    found = algorithm.prepare(examples_of(rows)).tokens["returns"]
    expected = []
    for i, mask in enumerate(rows.mask):
        costs = 0.3 * (rows.tokens["proximal"][i] - rows.tokens["reference"][i]) * mask
        later = rows.rows["reward"][i] - costs[::-1].cumsum()[::-1]
        expected.append(later * mask)
    np.testing.assert_allclose(found.numpy(), np.concatenate(expected), rtol=1e-10, atol=1e-12)


def test_a_step_whose_returns_are_all_the_same_says_nothing_of_explained_variance() -> None:
    rows = without(ragged(0), "token_rewards")
    same = replace(
        rows,
        tokens={**rows.tokens, "old_values": [0 * v for v in rows.tokens["old_values"]]},
        rows={**rows.rows, "reward": np.ones(len(rows))},
    )
    algorithm = PPO(lam=1.0)
    batch, new_BT = in_training(same, algorithm)
    assert "explained_variance" not in algorithm.loss(batch, new_BT).metrics
    assert batch.advantage_BT.abs().max() < 1e-6


def test_a_value_is_that_of_the_state_before_its_token() -> None:
    made = critic()
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad():
        values = made(ids)[0]
        for t in range(1, 5):
            state = made.backbone(input_ids=ids[:, :t]).last_hidden_state[0, -1]
            assert values[t].item() == pytest.approx(made.head(state).item(), abs=1e-5)
            other = ids.clone()
            other[0, t] = 9
            torch.testing.assert_close(made(other)[0, : t + 1], values[: t + 1], atol=0, rtol=0)
    assert values[0] == 0
    assert values[1:].std() > 0.01


def test_a_critic_that_has_learned_nothing_expects_nothing() -> None:
    made, _ = build(config(algorithm="ppo"), PPO())
    assert isinstance(made.critic, Critic)
    assert not made.critic(torch.tensor([[3, 4, 5]])).any()
    kept = dict(made.critic.backbone.state_dict())
    for name, value in made.policy.get_decoder().state_dict().items():
        assert torch.equal(kept[name], value)
        assert kept[name].data_ptr() != value.data_ptr()


def optimization(**trainer: Any) -> tuple[Any, Updater]:
    algorithm = PPO()
    made = networks(algorithm)
    settings = TrainerConfig.model_validate({"learning_rate": 1e-2} | trainer)
    return made, Updater(made, algorithm, settings, total_steps=9, temperature=1.0, pad_id=0)


def step_of(number: int) -> Examples:
    """Rows of a training step, as the feed gives them."""
    frame = frame_of(written(6, response=[3, 5, 2, 7, 4, 4]))
    rows = frame.with_columns(advantage=pl.lit(0.0), weight=pl.lit(1.0))
    return examples(rows, step=number)


def test_while_the_critic_warms_up_the_policy_stays_as_it_is() -> None:
    made, ours = optimization(critic={"warmup_steps": 2})
    policy, value = weights(made.policy), weights(made.critic)
    for number in (1, 2):
        measured = ours.step(step_of(number)).metrics
        assert measured["train/grad_norm"] == 0 < measured["train/critic_grad_norm"]
        assert torch.equal(policy, weights(made.policy))
    assert not torch.equal(value, weights(made.critic))
    assert ours.step(step_of(3)).metrics["train/grad_norm"] > 0
    assert not torch.equal(policy, weights(made.policy))


def test_the_critic_has_a_learning_rate_of_its_own() -> None:
    _, ours = optimization(critic={"learning_rate": 0.25})
    measured = ours.step(step_of(1)).metrics
    assert measured["train/critic_learning_rate"] == 0.25
    assert measured["train/learning_rate"] == 0.01


def test_the_critics_loss_leaves_the_policy_alone() -> None:
    gradients = []
    for coef in (0.0, 100.0):
        algorithm = PPO(value_coef=coef)
        made = networks(algorithm)
        settings = TrainerConfig(max_grad_norm=1e9)
        Updater(made, algorithm, settings, total_steps=1, temperature=1.0, pad_id=0).step(
            step_of(1)
        )
        gradients.append(torch.cat([p.grad.flatten() for p in made.policy.parameters()]))  # type: ignore[union-attr]
    assert torch.equal(*gradients)
    assert gradients[0].abs().max() > 0


def test_rewards_of_tokens_count_where_all_rows_have_them(store: Store) -> None:
    store.append("experiences", written(4, response=2, token_rewards=[9.0, 2.0, 0.0, 3.0]))
    store.append("experiences", written(5, response=2, reward=None)[4:])
    trainer = {"steps": 1, "batch_size": 5, "where": "true"}
    run(store, offline(algorithm={"ppo": {"lam": 1.0}}, trainer=trainer))
    found = dict(table(store, "metrics WHERE step = 1", "name, value").rows())
    # the critic says 0 of all; 9 and 2 stand before what was sampled
    assert found["train/value_loss"] == pytest.approx(0.5 * (3.0**2 + 3.0**2) / 2)
    assert found["train/rows"] == 4
    assert found["train/untrainable_rows"] == 1


def test_the_critic_learns_what_rewards_are_to_be_expected(store: Store) -> None:
    run(
        store,
        config(
            algorithm={"ppo": {"lam": 1.0, "whiten": False}},
            trainer={
                "steps": 12,
                "batch_size": 8,
                "learning_rate": 1e-5,
                "critic": {"learning_rate": 3e-2},
            },
        ),
    )
    values = table(store, "metrics WHERE name = 'train/explained_variance' ORDER BY step", "value")[
        "value"
    ].to_list()
    losses = table(store, "metrics WHERE name = 'train/value_loss' ORDER BY step", "value")[
        "value"
    ].to_list()
    assert max(values[-4:]) > values[0] == pytest.approx(0, abs=1e-6)
    assert sum(losses[-4:]) < sum(losses[:4])

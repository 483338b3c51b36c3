"""Distillation against the papers' formulas in float64, over small vocabularies, and TRL's."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.losses import Rows, apart, assert_loss_is, clipped, examples_of, ragged
from support.tiny_models import networks

from rlake.loop.algorithms.jsd import JSD, divergence, gradient
from rlake.loop.algorithms.on_policy_distillation import OnPolicyDistillation
from rlake.loop.losses import KL, Correction
from rlake.loop.models.divergence import compared
from rlake.store.errors import ConfigError

BETAS = [0.0, 0.25, 0.5, 0.9, 1.0]


def distributions(seed: int, *, size: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """The policy's and the teacher's probabilities."""
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.ones(size)), rng.dirichlet(np.ones(size))


def expected_divergence(own: np.ndarray, teacher: np.ndarray, beta: float) -> float:
    """Equation 1 of arXiv:2306.13649, token by token; its two ends are KL divergences."""

    def kl(p: np.ndarray, q: np.ndarray) -> float:
        return sum(float(a) * math.log(a / b) for a, b in zip(p, q, strict=True))

    if beta in (0.0, 1.0):
        return kl(own, teacher) if beta else kl(teacher, own)
    mixture = beta * teacher + (1 - beta) * own
    return beta * kl(teacher, mixture) + (1 - beta) * kl(own, mixture)


@pytest.mark.parametrize("beta", BETAS)
def test_the_divergence_is_that_of_the_paper(beta: float) -> None:
    for seed in range(5):
        own, teacher = distributions(seed)
        found = divergence(torch.tensor(own).log(), torch.tensor(teacher).log(), beta).sum()
        assert found.item() == pytest.approx(expected_divergence(own, teacher, beta), rel=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_the_divergence_is_that_of_trl(beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    rng = torch.Generator().manual_seed(1)
    own, teacher = (torch.randn(2, 5, 11, generator=rng).double() for _ in range(2))
    logs = own.log_softmax(-1), teacher.log_softmax(-1)
    found = JSD(beta=beta).over_vocabulary(*(x.reshape(10, 11) for x in logs)).mean()
    theirs = GKDTrainer.generalized_jsd_loss(own, teacher, beta=beta, reduction="none")
    assert found.item() == pytest.approx(theirs.sum(-1).mean().item(), rel=1e-9)


@pytest.mark.parametrize("beta", BETAS)
def test_the_mean_policy_gradient_over_sampled_tokens_is_the_divergences_gradient(
    beta: float,
) -> None:
    own, teacher = distributions(3)
    logits = torch.tensor(own).log().requires_grad_()
    log_own, log_teacher = logits.log_softmax(-1), torch.tensor(teacher).log()
    exact = torch.autograd.grad(divergence(log_own, log_teacher, beta).sum(), logits)[0]
    credit = gradient(log_own.detach(), log_teacher, beta)
    again = logits.log_softmax(-1)
    sampled = torch.autograd.grad((again.detach().exp() * credit * again).sum(), logits)[0]
    torch.testing.assert_close(sampled, exact, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_sampled_divergence_takes_the_gradient_of_each_token_that_came(beta: float) -> None:
    estimates: list[float] = []

    def token(rows: Rows, i: int, t: int) -> tuple[float, float]:
        q, p = math.exp(rows.old[i][t]), math.exp(rows.tokens["teacher_logprobs"][i][t])
        m = beta * p + (1 - beta) * q
        credit = math.log(p / q) if beta == 1 else -(1 - beta) * math.log(q / m)
        both = beta * p * math.log(p / m) + (1 - beta) * q * math.log(q / m)
        estimates.append((q * math.log(q / p) if beta == 1 else both) / q)
        ratio = math.exp(apart(rows, i, t))
        return -ratio * credit, -ratio * credit

    found = assert_loss_is(
        JSD(beta=beta, over="sampled"), ragged(2), token, how="token-mean", more=2
    )
    assert found["divergence"].item() == pytest.approx(np.mean(estimates), rel=1e-10)


def test_on_policy_distillation_credits_each_token_with_what_the_teacher_says() -> None:
    """Clipped surrogate with log p_teacher - log pi_old as the advantage of each token, negated."""
    for seed in range(4):
        rows = ragged(seed)
        told = [old - t for old, t in zip(rows.old, rows.tokens["teacher_logprobs"], strict=True)]

        def token(rows: Rows, i: int, t: int, told: list[np.ndarray] = told) -> tuple[float, float]:
            return clipped(math.exp(apart(rows, i, t)), -0.5 * told[i][t], 0.2, 0.2)

        made = OnPolicyDistillation(scale=0.5, clip=0.2)
        found = assert_loss_is(made, rows, token, how="token-mean", more=1)
        trained = np.concatenate([t[mask] for t, mask in zip(told, rows.mask, strict=True)])
        assert found["teacher_kl"].item() == pytest.approx(trained.mean())


@pytest.mark.parametrize("chunk_bytes", [1, 10_000])
def test_networks_are_compared_at_trained_tokens_however_the_work_is_cut(chunk_bytes: int) -> None:
    algorithm = JSD(beta=0.4)
    made = networks(algorithm)
    assert made.teacher is not None
    tokens = torch.tensor([[3, 13, 4, 5, 6], [5, 13, 9, 9, 0]])
    mask = torch.tensor([[0.0, 0, 1, 1, 0], [0.0, 0, 0, 1, 0]])
    found = compared(
        made.policy,
        made.teacher,
        algorithm.over_vocabulary,
        tokens,
        mask,
        temperature=0.8,
        chunk_bytes=chunk_bytes,
    )
    logs = [
        m(input_ids=tokens).logits[:, :-1].double().div(0.8).log_softmax(-1)
        for m in (made.policy, made.teacher)
    ]
    for row, t in [(0, 2), (0, 3), (1, 3)]:
        own, teacher = (x[row, t - 1].detach().exp().numpy() for x in logs)
        expected = expected_divergence(own, teacher, 0.4)
        assert found["vocabulary"][row, t].item() == pytest.approx(expected, rel=1e-4)
        assert found["logprobs"][row, t].item() == pytest.approx(
            logs[0][row, t - 1, tokens[row, t]].item(), rel=1e-5
        )
    assert not found["vocabulary"][mask == 0].any()
    found["vocabulary"].sum().backward()
    exact = sum(
        divergence(logs[0][row, t - 1], logs[1][row, t - 1].detach(), 0.4).sum()
        for row, t in [(0, 2), (0, 3), (1, 3)]
    )
    assert isinstance(exact, torch.Tensor)
    parameters = list(made.policy.parameters())
    expected = torch.autograd.grad(exact, parameters)
    for parameter, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("other", [30, 37])
def test_heads_of_other_sizes_are_compared_over_the_tokens_that_both_have(other: int) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    policy, teacher = (
        Qwen2ForCausalLM(Qwen2Config(vocab_size=size, **shape, **heads)).eval()
        for size in (33, other)
    )
    tokens, mask = torch.tensor([[3, 13, 4]]), torch.tensor([[0.0, 0.0, 1.0]])
    compare = JSD(beta=0.4).over_vocabulary
    found = compared(policy, teacher, compare, tokens, mask, temperature=1.0, chunk_bytes=10_000)
    own, theirs = (
        m(input_ids=tokens).logits[0, 1, : min(33, other)].double().softmax(-1).detach().numpy()
        for m in (policy, teacher)
    )
    expected = expected_divergence(own, theirs, 0.4)
    assert found["vocabulary"][0, 2].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("beta", BETAS)
def test_a_token_that_its_writer_found_next_to_impossible_leaves_the_estimate_finite(
    beta: float,
) -> None:
    rows = ragged(0)
    rows = replace(rows, tokens={**rows.tokens, "logprobs": [0 * x - 120.0 for x in rows.new]})
    step = examples_of(rows)
    told = {k: v.float() if v.is_floating_point() else v for k, v in step.tokens.items()}
    prepared = JSD(beta=beta, over="sampled").prepare(replace(step, tokens=told)).tokens
    assert torch.isfinite(prepared["divergence"]).all()
    assert torch.isfinite(prepared["advantage"]).all()


@pytest.mark.parametrize(
    "params", [{"kl": KL(coef=0.1)}, {"entropy_coef": 0.1}, {"correction": Correction(half_life=1)}]
)
def test_penalties_and_corrections_are_refused_where_they_would_do_nothing(
    params: dict[str, Any],
) -> None:
    JSD(over="sampled", **params)
    with pytest.raises(ConfigError, match=r"`jsd` over the vocabulary .* or set `over: sampled`"):
        JSD(**params)

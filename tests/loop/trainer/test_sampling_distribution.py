"""Stored log-probs and the trainer's are of one distribution, however tokens were sampled."""

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from support.builders import task
from support.tiny_models import config, offline, speaking, table, tiny, written
from transformers import PreTrainedModel

from rlake.loop.algorithms import resolve
from rlake.loop.inference.policy import Completion, Policy, Sampling, Turn
from rlake.loop.losses.batch import Examples, at_temperature, examples
from rlake.loop.models.token_logprobs import Scorer
from rlake.loop.run import run
from rlake.loop.trainer.step import scored
from rlake.loop.trajectories.conversation import Conversation
from rlake.loop.trajectories.trajectory import to_experiences
from rlake.store import Experience, Store, Task

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 1.3},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 0.7, "repetition_penalty": 1.4, "min_tokens": 5, "frequency_penalty": 0.5},
]
STILL = {"steps": 1, "learning_rate": 0.0}


def sampled(**sampling: Any) -> dict[str, Any]:
    return {
        "rewards": "support.tiny_models:share_of_ones",
        "sampling": {"max_tokens": 8, **sampling},
    }


def measured(store: Store, name: str, run_id: str = "demo") -> list[float]:
    where = f"metrics WHERE name = '{name}' AND run_id = '{run_id}' ORDER BY step"
    return table(store, where)["value"].to_list()


def likelihoods(
    model: PreTrainedModel, tokens: Sequence[int], temperature: float
) -> np.ndarray[Any, Any]:
    """The log-prob of each token but the first, in float64, by nothing of ours."""
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        logits_TV = model.eval()(input_ids=ids).logits[0].double().numpy() / temperature
    norm_T = np.log(np.exp(logits_TV).sum(-1))
    return logits_TV[np.arange(len(tokens) - 1), tokens[1:]] - norm_T[:-1]


@pytest.mark.parametrize("how", SAMPLINGS, ids=str)
def test_on_policy_ratios_are_one_however_tokens_are_sampled(
    store: Store, how: dict[str, Any]
) -> None:
    run(store, config(explorer=sampled(**how), trainer=STILL))
    assert measured(store, "train/ratio") == pytest.approx([1.0], abs=1e-5)
    assert measured(store, "train/clip_fraction") == [0.0]
    assert abs(measured(store, "train/kl")[0]) < 1e-6
    rows = table(store, "experiences")
    columns = Sampling(**how).columns
    others = columns.pop("sampling")
    assert rows.select(list(columns)).unique().rows(named=True) == [pytest.approx(columns)]
    assert [json.loads(text) for text in rows["sampling"].drop_nulls().unique()] == (
        [others] if others else []
    )
    model, _ = tiny()
    for tokens, mask, logprobs in rows.select("token_ids", "loss_mask", "logprobs").iter_rows():
        truth = likelihoods(model, tokens, how["temperature"])
        found, is_own = np.array(logprobs[1:]), np.array(mask[1:])
        np.testing.assert_allclose(found[is_own], truth[is_own], atol=1e-5)


def test_with_gspo_tokens_that_did_badly_have_a_gradient_under_top_p(store: Store) -> None:
    run(store, config(algorithm="gspo", explorer=sampled(top_p=0.95), trainer=STILL))
    assert measured(store, "train/clip_fraction") == [0.0]
    rows = table(store, "experiences").with_columns(weight=1.0, advantage=-1.0)
    algorithm, model = resolve("gspo"), tiny()[0]
    drawn = algorithm.prepare(examples(rows, needs=frozenset({"logprobs"})))
    batch = drawn.padded(range(len(drawn)), totals=drawn.totals, pad_id=0)
    logprobs = scored(Scorer(model), batch, temperature=1.0)["logprobs"].detach()
    logprobs.requires_grad_()
    algorithm.loss(batch, logprobs).value.backward()
    assert logprobs.grad is not None
    assert bool((logprobs.grad[batch.mask_BT > 0] != 0).all())


def test_rows_of_another_run_are_scored_at_the_temperature_they_were_sampled_at(
    store: Store,
) -> None:
    run(store, config(explorer=sampled(temperature=0.7), trainer=STILL))
    for name, others in (("offline", {}), ("online", {"explorer": sampled(temperature=1.3)})):
        mixed = {"past": {"share": 0.5, "run": "demo"}}
        sampler = {"mixed": {**mixed, "own": {"share": 0.5}}} if others else "fifo"
        trainer = {**STILL, "batch_size": 2, "sampler": sampler}
        changes = {"algorithm": {"grpo": {"group_size": 3}}, "trainer": trainer, **others}
        run(store, (config if others else offline)(name=name, **changes))
        assert measured(store, "train/ratio", name) == pytest.approx([1.0], abs=1e-5)
        assert abs(measured(store, "train/kl", name)[0]) < 1e-6
    rows = table(store, "draws JOIN experiences e USING (experience_id)", "draws.run_id, e.*")
    assert rows.filter(run_id="online")["temperature"].unique().sort().to_list() == [0.7, 1.3]


async def cold(task: Task, policy: Policy) -> list[Experience]:
    """A workflow that samples as it likes."""
    how = Sampling(temperature=0.5, max_tokens=8)
    [answer] = await policy.generate(list(task.messages), sampling=how)
    return to_experiences(task, [Turn(messages=list(task.messages), completion=answer)])


def test_a_workflow_with_sampling_of_its_own_is_scored_at_its_temperature(store: Store) -> None:
    explorer = {**sampled(temperature=1.3), "workflow": f"{__name__}:cold"}
    run(store, config(explorer=explorer, trainer=STILL))
    assert set(table(store, "experiences")["temperature"]) == {0.5}
    assert measured(store, "train/ratio") == pytest.approx([1.0], abs=1e-5)


def test_rows_without_a_temperature_are_at_the_runs_own_or_at_one() -> None:
    rows = pl.DataFrame(
        {
            "run_id": ["mine", "mine", "mine", "other", "other", None],
            "temperature": [None, 0.7, 0.0, None, 1.3, None],
        },
        schema={"run_id": pl.String, "temperature": pl.Float64},
    )

    def found(likelihoods: float | None = None, of_run: float = 0.9) -> list[float]:
        made = at_temperature(rows, run_id="mine", run_temperature=of_run, likelihoods=likelihoods)
        return made["temperature"].to_list()

    assert found() == [0.9, 0.7, 1.0, 1.0, 1.3, 1.0]
    assert found(of_run=0.0)[0] == 1.0
    assert found(likelihoods=1.0) == [1.0] * 6


@pytest.mark.parametrize("algorithm", ["sft", "raft"])
def test_what_is_imitated_is_likely_at_temperature_one(store: Store, algorithm: str) -> None:
    run(store, config(algorithm=algorithm, explorer=sampled(temperature=0.5), trainer=STILL))
    drawn = table(store, "draws JOIN experiences e USING (experience_id) WHERE weight > 0", "e.*")
    assert set(drawn["temperature"]) == {0.5}
    assert measured(store, "train/nll") == pytest.approx([nll_of(drawn)], rel=1e-5)


@pytest.mark.parametrize("algorithm", ["mix", "chord"])
def test_an_expert_is_imitated_at_temperature_one_and_the_rest_weighed_at_its_own(
    store: Store, algorithm: str
) -> None:
    taught = [
        replace(row, experience_id=f"x{i}", group_id=f"x{i}", run_id="teacher", temperature=0.3)
        for i, row in enumerate(written(2, response=6, source="expert", logprobs=None))
    ]
    store.append("experiences", taught)
    mixed = {
        "own": {"share": 0.5},
        "expert": {"share": 0.5, "run": "teacher", "sampler": "uniform"},
    }
    trainer = {**STILL, "batch_size": 4, "sampler": {"mixed": mixed}}
    explorer = {**sampled(temperature=0.7), "group_size": 3}
    run(store, config(algorithm={algorithm: {"mu": 0.5}}, explorer=explorer, trainer=trainer))
    assert measured(store, "train/ratio") == pytest.approx([1.0], abs=1e-5)
    drawn = table(store, "draws JOIN experiences e USING (experience_id)", "e.*")
    experts = drawn.filter(source="expert")
    assert measured(store, "train/nll") == pytest.approx([nll_of(experts)], rel=1e-5)


def nll_of(rows: pl.DataFrame) -> float:
    """The mean negative log-likelihood of rows' trained tokens at temperature 1."""
    model, _ = tiny()
    values = [
        -likelihoods(model, tokens, 1.0)[np.array(mask[1:])]
        for tokens, mask in rows.select("token_ids", "loss_mask").iter_rows()
    ]
    return float(np.concatenate(values).mean())


def test_a_reference_is_asked_at_the_temperature_of_each_row(store: Store) -> None:
    rows = drawn_at([0.5, 1.0, 1.7, 0.5])
    from rlake.loop.config import TrainerConfig
    from rlake.loop.trainer.networks import Networks
    from rlake.loop.trainer.step import Updater

    model, reference = tiny()[0], tiny(seed=1)[0]
    algorithm = resolve({"grpo": {"kl": {"coef": 0.1}}})
    optimization = Updater(
        Networks(model, reference=reference), algorithm, TrainerConfig(), total_steps=1, pad_id=0
    )
    found = optimization.with_statistics(rows, frozenset({"reference", "proximal"}))
    starts = rows.starts.tolist()
    for name, network in (("reference", reference), ("proximal", model)):
        for i, temperature in enumerate(rows.rows["temperature"].tolist()):
            at = slice(starts[i], starts[i + 1])
            tokens, is_own = rows.tokens["token_ids"][at].tolist(), rows.tokens["mask"][at] > 0
            truth = np.concatenate([[0.0], likelihoods(network, tokens, temperature)])
            np.testing.assert_allclose(
                found.tokens[name][at][is_own].numpy(), truth[is_own.numpy()], atol=1e-5
            )


def drawn_at(temperatures: Sequence[float]) -> Examples:
    columns = ("experience_id", "token_ids", "loss_mask", "logprobs", "group_id")
    rows = [row.row() for row in written(len(temperatures), response=[3, 5, 4, 6])]
    frame = pl.DataFrame([{name: row[name] for name in columns} for row in rows])
    return examples(
        frame.with_columns(
            temperature=pl.Series(temperatures), weight=1.0, advantage=1.0, group=pl.lit(0)
        )
    )


def talked(*temperatures: float) -> list[Experience]:
    """A conversation with the tiny model whose turns are sampled at these temperatures."""

    async def talk() -> list[Experience]:
        conversation = Conversation(task(0), speaking())
        for temperature in temperatures:
            how = Sampling(temperature=temperature, max_tokens=3, top_k=5)
            await conversation.respond(sampling=how)
            conversation.add("1+1=")
        return conversation.rows()

    return asyncio.run(talk())


def test_turns_sampled_with_other_settings_are_rows_of_their_own() -> None:
    [one] = talked(0.7, 0.7)
    assert (one.num_turns, one.temperature, one.top_k, one.top_p) == (2, 0.7, 5, None)
    first, second = talked(0.7, 1.3)
    assert (first.temperature, second.temperature) == (0.7, 1.3)
    assert sum(second.loss_mask or ()) == 3  # what was sampled at 0.7 is only its prompt
    [greedy] = talked(0.0)
    assert (greedy.temperature, greedy.top_k) == (0.0, None)


def test_turns_of_text_stay_one_row_without_the_settings_in_which_they_differ() -> None:
    def turn(temperature: float, *said: str) -> Turn:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
        how = Sampling(temperature=temperature, top_p=0.9)
        answer = Completion(text="ok", finish_reason="stop", sampling=how)
        return Turn(messages=messages, completion=answer)

    [row] = to_experiences(task(0), [turn(0.7, "a"), turn(1.0, "a", "ok", "b")])
    assert (row.num_turns, row.temperature, row.top_p) == (2, None, 0.9)


def test_a_run_that_truncates_is_warned_once_of_what_it_means(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        return [r.message for r in caplog.records if "truncates" in r.message]

    with caplog.at_level(logging.WARNING):
        run(store, config(explorer=sampled(top_p=0.9, min_p=0.05), trainer=STILL))
        [message] = told()
        assert "(top_p 0.9, min_p 0.05)" in message
        assert "arXiv:2512.02556" in message
        imitated = {"algorithm": "sft", "explorer": sampled(top_k=3)}
        run(store, config(name="other", **imitated, trainer=STILL))
        run(store, config(name="whole", explorer=sampled(), trainer=STILL))
        assert len(told()) == 1
        how = sampled(min_tokens=2, presence_penalty=0.5)
        run(store, config(name="penalized", explorer=how, trainer=STILL))
    assert len(told()) == 1
    [message] = [r.message for r in caplog.records if "changes the logits" in r.message]
    assert "(min_tokens 2, presence_penalty 0.5)" in message

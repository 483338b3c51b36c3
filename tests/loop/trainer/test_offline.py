"""Training on what is stored: which rows each step gets, and what `draws` says of them."""

import json
import re
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from support.tiny_models import metric, offline, table, tiny, written

from rlake.loop import run as run_module
from rlake.loop.cli.run_summary import warn_of_untrained
from rlake.loop.models.load import load_folder, tokenizer_digest
from rlake.loop.models.token_logprobs import token_logprobs
from rlake.loop.run import run
from rlake.loop.runs.job import run_folder
from rlake.loop.weight_sync import newest
from rlake.store import Experience, Store
from rlake.store.errors import ConfigError, JobError, StarvedError
from rlake.store.ids import row_digests


def train(store: Store, rows: Sequence[Experience] = (), **changes: Any) -> pl.DataFrame:
    """Store rows, train on them, and return what was drawn, in order."""
    if rows:
        store.append("experiences", rows)
    run(store, offline(**changes))
    return table(store, "draws_current ORDER BY step, position")


MOST = "the most frequent reason: "


@pytest.mark.parametrize(
    ("rows", "epochs", "sampler"),
    [
        *((rows, epochs, {"fifo": {}}) for rows in (10, 8, 3) for epochs in (1, 5)),
        (22, 3, {"uniform": {}}),
        (14, 3, {"prioritized": {"priority": "1 + rollout_index"}}),
    ],
)
def test_every_row_is_drawn_exactly_as_often_as_there_are_epochs(
    store: Store, rows: int, epochs: int, sampler: dict[str, Any]
) -> None:
    trainer = {"batch_size": 4, "max_uses": epochs, "sampler": sampler}
    drawn = train(store, written(rows), trainer=trainer)
    assert set(Counter(drawn["experience_id"]).values()) == {epochs}
    assert drawn["experience_id"].n_unique() == rows
    for own in drawn.partition_by("experience_id"):
        assert own.sort("step")["epoch"].to_list() == list(range(1, epochs + 1))
    for step in drawn.partition_by("step"):
        assert step["experience_id"].n_unique() == step.height


def test_the_last_step_takes_what_is_left(store: Store) -> None:
    drawn = train(store, written(10), trainer={"batch_size": 4})
    sizes = drawn.group_by("step").len().sort("step")["len"].to_list()
    assert sizes == [4, 4, 2]
    assert metric(store, "train/rows") == {1: 4, 2: 4, 3: 2}


def test_a_step_that_can_never_be_drawn_says_so_at_once(store: Store) -> None:
    with pytest.raises(StarvedError) as caught:
        train(store, written(6), trainer={"batch_size": 4, "steps": 3})
    said = str(caught.value)
    assert "step 3 of run `demo` can never be drawn" in said
    assert "need 4 rows, have 0 fresh, 0 stale, 6 drawn as often as allowed" in said
    assert "lower `trainer.steps`, or raise `trainer.max_uses`" in said
    [error] = table(store, "runs", "error")["error"].to_list()
    assert error == said


def test_a_run_that_is_stopped_is_not_done(store: Store) -> None:
    store.append("experiences", written(8))
    stop = threading.Event()
    with pytest.raises(JobError, match="the run was stopped after step 1 of 4"):
        run_module.train(store, offline(), stop=stop, listener=lambda *_: stop.set())
    [row] = table(store, "runs").to_dicts()
    assert (row["status"], store.count("draws")) == ("failed", 2)


def test_with_nothing_to_train_on_no_step_is_taken(store: Store) -> None:
    with pytest.raises(ConfigError, match="there is nothing to train on: need 2 rows, have 0"):
        train(store, written(4), trainer={"where": "reward > 5"})
    assert store.count("draws") == store.count("job_events") == 0


def test_only_rows_that_the_condition_names_are_drawn(store: Store) -> None:
    drawn = train(store, written(12), trainer={"where": "reward > 0 AND task_id <> 't1'"})
    chosen = store.sql(
        "SELECT experience_id FROM experiences WHERE reward > 0 AND task_id <> 't1'"
    ).fetchall()
    assert set(drawn["experience_id"]) == {i for (i,) in chosen}
    assert drawn.height == 4


def test_dropped_rows_are_not_drawn(store: Store) -> None:
    bad = [
        Experience(task_id="t", group_id="x", experience_id=f"x/{i}", drop_reason="workflow failed")
        for i in range(3)
    ]
    drawn = train(store, [*written(4), *bad])
    assert sorted(drawn["experience_id"]) == [r.experience_id for r in written(4)]


def test_a_draw_says_what_was_read_and_with_what_weight(store: Store) -> None:
    text = Experience(
        task_id="t", group_id="z", experience_id="z/00", prompt_text="1+1=", response_text="2"
    )
    drawn = train(store, [*written(2), text], trainer={"batch_size": 3})
    assert drawn["run_id"].to_list() == ["demo"] * 3
    assert drawn["attempt"].to_list() == [1] * 3
    assert drawn["position"].to_list() == [0, 1, 2]
    assert drawn["experience_id"].to_list() == ["g000/00", "g000/01", "z/00"]
    assert drawn["weight"].to_list() == [1.0] * 3
    assert drawn["epoch"].to_list() == [1] * 3
    assert [json.loads(s)["strategy"] for s in drawn["sampler"]] == ["fifo"] * 3
    assert drawn["lag"].to_list() == [None] * 3
    digest = tokenizer_digest(tiny()[1])
    assert drawn["tokenizer"].to_list() == [None, None, digest]
    facts = store.sql(
        "SELECT token_ids, loss_mask, logprobs, temperature, reward, messages, prompt_text, "
        "response_text FROM experiences ORDER BY experience_id"
    )
    assert drawn["digest"].to_list() == row_digests(facts.to_arrow_table())


def test_rows_longer_than_the_model_are_recorded_and_not_trained_on(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = train(store, written(3, response=[3, 60, 3]), trainer={"batch_size": 3})
    assert drawn["weight"].to_list() == [1.0, 0.0, 1.0]
    assert metric(store, "train/rows") == {1: 2}
    assert metric(store, "train/untrainable_rows") == {1: 1}
    assert metric(store, "train/tokens") == {1: 6}
    [(name, why)] = store.sql("SELECT experience_id, error FROM operator_errors").fetchall()
    assert name == drawn["experience_id"][1]
    assert re.fullmatch(r"its \d+ tokens are more than the \d+ that the model accepts", why)
    warn_of_untrained(store, "demo")
    assert f"warning: 1 row could not be trained on (see `operator_errors`); {MOST}{why}" in (
        capsys.readouterr().err
    )


def test_rows_without_an_answer_are_recorded_and_not_trained_on(store: Store) -> None:
    rows: list[Experience] = [
        Experience(
            task_id="t",
            group_id="z",
            experience_id=f"z/0{i}",
            prompt_text="1+1=",
            response_text=answer,
        )
        for i, answer in enumerate(("2", None))
    ]
    drawn = train(store, rows)
    assert drawn["weight"].to_list() == [1.0, 0.0]
    assert metric(store, "train/rows") == {1: 1}


def test_a_step_of_nothing_usable_changes_nothing_and_says_so(store: Store) -> None:
    train(store, written(4, response=[60, 60, 3, 3]), trainer={"batch_size": 2})
    assert metric(store, "train/skipped") == {1: 1.0}
    assert metric(store, "train/rows") == {1: 0, 2: 2}


def test_a_run_that_could_train_on_nothing_fails_and_publishes_no_weights(store: Store) -> None:
    with pytest.raises(JobError, match="none of the 4 drawn rows") as caught:
        train(store, written(4, response=60), trainer={"batch_size": 2})
    assert "tokens are more than the 48 that the model accepts" in str(caught.value)
    assert store.sql("SELECT status FROM runs").fetchall() == [("failed",)]
    assert store.sql("SELECT policy_version FROM policies").fetchall() == [(0,)]


GRPO: dict[str, Any] = {"algorithm": "grpo", "trainer": {"batch_size": 3}}


def test_advantages_are_those_of_whole_groups_and_are_on_record(store: Store) -> None:
    rewards = [1.0, 0.0, 0.5, 0.0, 0.25, 1.0, 1.0, 0.0, 0.7, 0.7, 0.7, 0.7]
    rows = [
        Experience(**{**vars(r), "reward": reward})
        for r, reward in zip(written(12), rewards, strict=True)
    ]
    drawn = train(store, rows, **GRPO)
    groups = np.array(rewards).reshape(3, 4)
    spread = groups.std(axis=1, ddof=1, keepdims=True)
    expected = (groups - groups.mean(axis=1, keepdims=True)) / (spread + 1e-6)
    expected[2] = 0  # equal rewards say nothing
    assert drawn["experience_id"].to_list() == [r.experience_id for r in rows]
    np.testing.assert_allclose(drawn["advantage"].to_numpy(), expected.flatten(), atol=1e-12)


def test_a_row_without_reward_has_no_credit_no_weight_and_no_say_in_its_group(store: Store) -> None:
    rows = [
        Experience(**{**vars(r), "reward": reward})
        for r, reward in zip(written(4), [1.0, None, 0.0, 0.5], strict=True)
    ]
    drawn = train(store, rows, algorithm="grpo", trainer={"batch_size": 1})
    assert drawn["advantage"].to_list() == pytest.approx([1.0, None, -1.0, 0.0], abs=1e-5)
    assert drawn["weight"].to_list() == [1.0, 0.0, 1.0, 1.0]
    assert metric(store, "train/reward_mean") == {1: 0.5}
    assert metric(store, "train/untrainable_rows") == {1: 1}


def test_statistics_see_the_rows_of_a_group_that_the_condition_leaves_out(store: Store) -> None:
    rows = [
        Experience(**{**vars(r), "reward": reward})
        for r, reward in zip(written(4), [1.0, 0.0, 0.0, 0.0], strict=True)
    ]
    drawn = train(
        store, rows, algorithm="grpo", trainer={"batch_size": 1, "where": "rollout_index <> 3"}
    )
    assert drawn["experience_id"].to_list() == ["g000/00", "g000/01", "g000/02"]
    assert drawn["advantage"].to_list() == pytest.approx([1.5, -0.5, -0.5], abs=1e-5)


def test_an_algorithm_that_weighs_by_logprobs_refuses_rows_without_and_names_one(
    store: Store,
) -> None:
    with pytest.raises(JobError, match=r"experience `g000/00` has no logprobs.*IS NOT NULL"):
        train(store, written(4, logprobs=None), algorithm="grpo", trainer={"batch_size": 1})


def test_an_algorithm_of_a_user_is_trained_with(store: Store) -> None:
    drawn = train(
        store, written(4), algorithm="support.tiny_models:Reinforce", trainer={"batch_size": 1}
    )
    assert drawn["advantage"].to_list() == pytest.approx([-2 / 3, 2 / 3, -2 / 3, 2 / 3])


def test_training_makes_stored_answers_likelier(store: Store) -> None:
    train(
        store,
        written(8, response=6),
        trainer={"batch_size": 8, "max_uses": 40, "learning_rate": 3e-2},
    )
    loss = metric(store, "train/nll")
    assert loss[40] < 0.5 * loss[1]


def test_the_loss_of_held_out_rows_is_measured_and_they_are_not_trained_on(store: Store) -> None:
    rows = written(12)
    drawn = train(
        store,
        rows,
        trainer={
            "batch_size": 3,
            "checkpoint_every": 2,
            "where": "rollout_index < 3",
            "eval_where": "rollout_index IN (1, 3)",
        },
    )
    assert set(drawn["experience_id"].str.slice(-2)) == {"00", "02"}
    measured = metric(store, "eval/loss")
    assert sorted(measured) == [0, 2]
    model, _ = tiny()
    held = [r for r in rows if r.rollout_index in (1, 3)]
    with torch.no_grad():
        nll = [-token_logprobs(model, torch.tensor([list(r.token_ids or ())]))[0, 2:] for r in held]
    assert measured[0] == pytest.approx(float(torch.cat(nll).mean()), rel=1e-5)


def test_held_out_rows_that_are_not_there_are_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match="no stored row matches"):
        train(store, written(2), trainer={"eval_where": "reward > 7"})


def test_the_numbers_of_each_step_are_stored(store: Store) -> None:
    train(
        store,
        written(8),
        trainer={"batch_size": 4, "lr_scheduler": {"warmup_steps": 2}, "learning_rate": 1e-3},
    )
    found = table(store, "metrics")
    assert set(found["job"]) == {"train"}
    names = set(found.filter(pl.col("step") == 2)["name"])
    assert {"train/loss", "train/nll", "train/grad_norm", "train/rows", "train/tokens"} <= names
    assert metric(store, "train/learning_rate") == pytest.approx({1: 0.0005, 2: 0.001})


def test_an_offline_run_publishes_its_start_and_its_end(store: Store) -> None:
    train(store, written(8), trainer={"batch_size": 2})
    rows = store.sql("SELECT policy_version, parent_version FROM policies ORDER BY 1").fetchall()
    assert rows == [(0, None), (4, 0)]
    model, _ = load_folder(newest(store, run_folder(store, offline()), "demo").folder)
    start, _ = tiny()
    assert not all(map(torch.equal, model.parameters(), start.parameters()))


def test_two_runs_of_one_configuration_are_the_same(store: Store) -> None:
    store.append("experiences", written(8))
    for name in ("one", "two"):
        run(store, offline(name=name, trainer={"batch_size": 4, "sampler": "uniform"}))
    drawn = table(store, "draws ORDER BY step, position").partition_by("run_id")
    assert drawn[0]["experience_id"].to_list() == drawn[1]["experience_id"].to_list()
    losses = store.sql(
        "SELECT run_id, list(value ORDER BY step) FROM metrics WHERE name = 'train/loss' GROUP BY 1"
    ).fetchall()
    assert losses[0][1] == losses[1][1]


def test_another_seed_draws_in_another_order(store: Store) -> None:
    store.append("experiences", written(12))
    for seed in (0, 1):
        run(store, offline(name=f"s{seed}", seed=seed, trainer={"sampler": "uniform"}))
    drawn = table(store, "draws ORDER BY step, position").partition_by("run_id")
    assert drawn[0]["experience_id"].to_list() != drawn[1]["experience_id"].to_list()


def test_a_run_that_is_done_is_continued_for_more_steps(store: Store) -> None:
    store.append("experiences", written(8))
    run(store, offline(trainer={"steps": 2, "batch_size": 2}))
    run(store, offline(trainer={"steps": 4, "batch_size": 2}), resume=True)
    drawn = table(store, "draws_current ORDER BY step, position")
    assert drawn["step"].to_list() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert drawn["experience_id"].n_unique() == 8
    assert drawn["attempt"].to_list() == [1] * 4 + [2] * 4


def test_rows_that_are_not_finite_are_named_and_skipped_and_a_limit_stops_the_run(
    store: Store,
) -> None:
    good, bad = [0.0, 0.0, -1.0, -1.0, -1.0], [0.0, 0.0, -1e30, -1.0, -1.0]
    squared = {"rec": {"group_size": 4, "regularizer": "k2", "coef": 1.0}}
    rows = [
        replace(row, logprobs=bad if i in (0, 4) else good) for i, row in enumerate(written(12))
    ]
    train(store, rows, algorithm=squared, trainer={"batch_size": 1})
    failed = table(store, "operator_errors")
    assert failed["experience_id"].to_list() == ["g000/00", "g001/00"]
    assert set(failed["operator"]) == {"train"}
    assert "its loss is inf" in failed["error"][0]
    assert metric(store, "train/updates") == {1: 0.0, 2: 0.0, 3: 1.0}
    with pytest.raises(JobError, match=r"2 steps in a row .*`g00./00`: its loss is inf"):
        train(
            store,
            [],
            name="strict",
            algorithm=squared,
            trainer={"batch_size": 1, "max_nonfinite_steps": 2},
        )
    told = "SELECT run_id, count(*) FROM metrics WHERE name = 'train/skipped' GROUP BY 1"
    assert sorted(store.sql(told).fetchall()) == [("demo", 2), ("strict", 2)]


def test_groups_of_equal_rewards_are_counted_and_move_nothing(store: Store) -> None:
    rows = [replace(row, reward=1.0 if i < 4 else row.reward) for i, row in enumerate(written(8))]
    train(store, rows, algorithm={"grpo": {"group_size": 4}}, trainer={"batch_size": 1})
    assert metric(store, "train/zero_advantage_rows") == {1: 4, 2: 0}
    norms = metric(store, "train/grad_norm")
    assert norms[1] == 0 < norms[2]


def test_lag_counts_steps_of_the_run_that_wrote_a_row_and_no_other(store: Store) -> None:
    mine = [replace(row, policy_version=0) for row in written(4)]
    rows = [replace(row, run_id="demo" if i < 2 else "other") for i, row in enumerate(mine)]
    drawn = train(store, rows, trainer={"batch_size": 4, "max_uses": 2})
    lags = {step: part["lag"].to_list() for (step,), part in drawn.group_by("step")}
    assert lags == {1: [0, 0, None, None], 2: [1, 1, None, None]}


def test_what_is_imported_meanwhile_does_not_change_a_run_that_is_resumed(store: Store) -> None:
    train(store, written(6), trainer={"batch_size": 2, "steps": 2})
    late = [
        replace(row, experience_id=f"a{row.experience_id}", group_id=f"a{row.group_id}")
        for row in written(6)
    ]
    store.append("experiences", late)
    run(store, offline(trainer={"batch_size": 2}), resume=True)
    drawn = table(store, "draws_current ORDER BY step, position")
    assert set(drawn["experience_id"]) == {row.experience_id for row in written(6)}
    assert drawn["step"].max() == 3
    assert store.at("demo.rows").count("experiences") == 6


@pytest.mark.parametrize(
    "bad",
    [
        {"token_ids": None, "loss_mask": None, "logprobs": None, "messages": "no JSON"},
        {"token_ids": [3, 13, 9_999, 4, 5]},
        {"loss_mask": None},
    ],
    ids=["messages that are no JSON", "a token the model does not have", "no loss mask"],
)
def test_one_bad_row_costs_itself_and_never_the_run(store: Store, bad: dict[str, Any]) -> None:
    rows = [row.row() for row in written(4)]
    rows[1] |= bad
    if bad.get("token_ids", ()) is None:
        rows[1] |= {"num_tokens": None, "prompt_length": None}
    store.append("experiences", rows)
    drawn = train(store, trainer={"batch_size": 4})
    weights = dict(zip(drawn["experience_id"], drawn["weight"], strict=True))
    assert [weights[row["experience_id"]] for row in rows] == [1, 0, 1, 1]
    assert metric(store, "train/untrainable_rows") == {1: 1}

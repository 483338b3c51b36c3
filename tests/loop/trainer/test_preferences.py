"""Training on stored preferences: which pairs each step gets, and what `draws` says of them."""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from bench.recipes import settings
from support.preferences import prefer, preference
from support.tiny_models import SUMS, metric, offline, table, written

from rlake.loop import run as run_module
from rlake.loop.report.summary import summary
from rlake.loop.run import run
from rlake.loop.runs.progress import Display
from rlake.loop.trainer.redraw import rebuild
from rlake.store import Store, connect
from rlake.store.errors import ConfigError
from rlake.store.ids import preference_id
from rlake.store.lineage.policy import of_policy
from rlake.store.verify_draws import verify


def train(store: Store, **changes: Any) -> pl.DataFrame:
    """Train on pairs, and return what was drawn, in order."""
    run(store, offline(**{"algorithm": "dpo"} | changes))
    return table(store, "draws_current ORDER BY step, position")


@pytest.mark.parametrize("epochs", [1, 3])
def test_every_pair_is_drawn_as_often_as_there_are_epochs_with_both_its_rows(
    store: Store, epochs: int
) -> None:
    names = prefer(store, 6)
    drawn = train(store, trainer={"batch_size": 2, "max_uses": epochs})
    assert Counter(drawn["preference_id"]) == dict.fromkeys(names, 2 * epochs)
    pairs = {p["preference_id"]: p for p in table(store, "preferences").to_dicts()}
    for step in drawn.partition_by("step"):
        assert step["position"].to_list() == list(range(4))
        for i, row in enumerate(step.to_dicts()):
            side = "chosen_id" if i % 2 == 0 else "rejected_id"
            assert row["experience_id"] == pairs[row["preference_id"]][side]
    assert set(metric(store, "train/rows").values()) == {4.0}


def test_a_row_may_be_in_several_pairs_of_a_step_and_pairs_have_an_accuracy(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    prefer(store, 6)
    settings = offline(algorithm="dpo", trainer={"batch_size": 6})
    with Display(settings, total_steps=1) as listener:
        run(store, settings, listener=listener)
    drawn = table(store, "draws_current ORDER BY step, position")
    assert "train 1/1  accuracy 0.5  margin 0  loss 0.6931" in capsys.readouterr().err
    assert summary(store, settings.name).keys() >= {"final_accuracy", "final_margin", "final_loss"}
    assert drawn["experience_id"].n_unique() == 7
    assert drawn.height == 12
    assert metric(store, "train/accuracy").keys() == {1}


def test_pairs_are_chosen_by_sql_over_preferences(store: Store) -> None:
    names = prefer(store, 6)
    where = {"where": "margin >= 2", "batch_size": 4}
    assert set(train(store, trainer=where)["preference_id"]) == set(names[2:])
    query = "SELECT preference_id FROM preferences ORDER BY margin LIMIT 2"
    drawn = train(store, name="other", trainer={"source": query, "batch_size": 2})
    assert set(drawn.filter(run_id="other")["preference_id"]) == set(names[:2])


def test_pairs_of_a_snapshot_are_those_of_then(store: Store) -> None:
    names = prefer(store, 3)
    store.snapshot("then")
    store.append("preferences", [preference("g000/00", "g000/02")])
    drawn = train(store, trainer={"at": "then", "batch_size": 3})
    assert set(drawn["preference_id"]) == set(names)


def test_pairs_are_drawn_by_priority(store: Store) -> None:
    names = prefer(store, 6)
    how = {"prioritized": {"priority": "margin * (margin > 3)::INT", "beta": 1.0}}
    drawn = train(store, trainer={"sampler": how, "batch_size": 2, "steps": 1})
    assert set(drawn["preference_id"]) == set(names[4:])
    assert drawn["weight"][0] == drawn["weight"][1]
    assert drawn["weight"].max() == 1.0
    assert drawn["weight"].n_unique() == 2


def test_sources_of_pairs_are_mixed_by_their_shares(store: Store) -> None:
    names = prefer(store, 6)
    mixed = {
        "wide": {"share": 0.5, "where": "margin >= 3", "source": "SELECT * FROM preferences"},
        "near": {"share": 0.5, "where": "margin < 3", "source": "SELECT * FROM preferences"},
    }
    trainer = {"sampler": {"mixed": mixed}, "batch_size": 2, "steps": 2}
    drawn = train(store, trainer=trainer)
    wide = drawn.filter(source="wide")
    assert (wide.height, drawn.height) == (4, 8)
    assert set(wide["preference_id"]) <= set(names[3:])
    for step in (1, 2):
        assert verify(store, "demo", step).holds
        assert rebuild(store, "demo", step).is_same


def test_a_pair_that_cannot_be_trained_on_weighs_nothing_as_a_whole(store: Store) -> None:
    rows = written(8)
    rows[1] = replace(rows[1], token_ids=None, loss_mask=None, logprobs=None)
    rows[2] = replace(rows[2], token_ids=[3] * 99, loss_mask=[True] * 99, logprobs=[0.0] * 99)
    rows[3] = replace(rows[3], drop_reason="too_slow")
    rows[4] = replace(rows[4], loss_mask=[False] * 5)
    store.append("experiences", rows)
    ids = [str(row.experience_id) for row in rows]
    bad = [(ids[0], ids[1]), (ids[2], ids[0]), (ids[0], ids[3]), (ids[4], ids[0])]
    bad += [(ids[0], "nowhere"), (ids[5], ids[5])]
    good = [(ids[0], ids[5]), (ids[6], ids[7])]
    store.append("preferences", [preference(*pair) for pair in [*bad, *good]])
    drawn = train(store, trainer={"batch_size": 8})
    weights = drawn.group_by("preference_id").agg("weight").rows()
    assert dict(weights) == {
        preference_id(*pair): [1.0, 1.0] if pair in good else [0.0, 0.0] for pair in [*bad, *good]
    }
    assert metric(store, "train/untrainable_rows") == {1: 12.0}
    assert metric(store, "train/rows") == {1: 4.0}
    assert verify(store, "demo", 1).holds
    assert rebuild(store, "demo", 1).is_same
    store.append("experiences", [replace(rows[7], experience_id="nowhere", reward=0.5)])
    assert not verify(store, "demo", 1).holds, "what was missing is there now"


def test_an_operator_that_leaves_out_a_row_leaves_out_its_pair(store: Store) -> None:
    prefer(store, 4)
    operators = [{"keep": {"where": "rollout_index != 2"}}]
    drawn = train(store, trainer={"batch_size": 4, "operators": operators})
    left_out = drawn.filter(pl.col("weight") == 0)
    assert left_out["preference_id"].n_unique() == 2
    assert left_out.height == 4
    assert rebuild(store, "demo", 1).is_same


def test_pairs_of_text_are_tokenized_when_drawn(store: Store) -> None:
    texts = {"prompt_text": "1+2=", "token_ids": None, "loss_mask": None, "logprobs": None}
    rows = [replace(row, **texts, response_text=f"{i}") for i, row in enumerate(written(3))]
    store.append("experiences", rows)
    pairs = [("g000/00", "g000/01"), ("g000/00", "g000/02")]
    store.append("preferences", [preference(*pair) for pair in pairs])
    drawn = train(store, trainer={"batch_size": 2})
    assert drawn["weight"].to_list() == [1.0] * 4
    assert drawn["tokenizer"].null_count() == 0


@pytest.mark.parametrize("how", [pytest.param("fifo", marks=pytest.mark.slow), "uniform"])
def test_a_killed_run_of_pairs_goes_on_bit_for_bit(
    store: Store, empty_store: Path, tmp_path: Path, how: str
) -> None:
    store2 = connect(shutil.copytree(empty_store, tmp_path / "killed"))
    stores = store, store2
    names = prefer(store, 6), prefer(store2, 6)
    assert names[0] == names[1]
    config = offline(
        algorithm="dpo",
        trainer={"batch_size": 2, "max_uses": 2, "checkpoint_every": 2, "sampler": {how: {}}},
    )
    run(store, config)

    def fail(job: str, step: int, _: object) -> None:
        if job == "train" and step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(store2, config, listener=fail)
    run(store2, config, resume=True)
    columns = "step, position, experience_id, preference_id, weight, epoch, digest, batch_digest"
    drawn = [table(s, "draws_current ORDER BY step, position", columns) for s in stores]
    assert drawn[0].equals(drawn[1])
    digests = [table(s, "policies_current WHERE policy_version = 6", "digest") for s in stores]
    assert digests[0].height == 1
    assert digests[0].equals(digests[1])
    assert metric(store, "train/loss") == metric(store2, "train/loss")
    for step in range(1, 7):
        assert verify(store2, "demo", step).holds
        assert rebuild(store2, "demo", step).is_same


def test_lineage_of_weights_tells_the_pairs(store: Store) -> None:
    prefer(store, 4)
    train(store, trainer={"batch_size": 2})
    found = of_policy(store, "demo", 2)
    assert found.rows["num_rows"] == 8
    assert found.rows["num_experiences"] == 5
    drawn = store.sql(found.sql).pl()
    assert drawn["preference_id"].n_unique() == 4


def test_held_out_pairs_are_measured_and_never_trained_on(store: Store) -> None:
    names = prefer(store, 6)
    held = {"eval_where": "margin >= 4", "batch_size": 2, "max_uses": 20}
    drawn = train(store, trainer={**held, "learning_rate": 1e-2})
    assert set(drawn["preference_id"]) == set(names[:4])
    accuracy, loss = metric(store, "eval/accuracy"), metric(store, "eval/loss")
    assert accuracy[0] == 0.5, "the policy is the reference still"
    assert set(accuracy) == set(loss) == {0, 40}
    assert loss[0] == pytest.approx(0.6931, abs=1e-4)
    assert loss[40] != loss[0]


def test_pairs_that_are_not_there_are_asked_for(store: Store) -> None:
    store.append("experiences", written(4))
    told = "the store has no preferences; make some from stored rollouts with the operator `pairs`"
    with pytest.raises(ConfigError, match=told):
        train(store)


def test_no_pair_that_fits_says_where_to_look(store: Store) -> None:
    prefer(store, 3)
    with pytest.raises(ConfigError, match=r"need 2 pairs, have 0 fresh.*look at `trainer\.where`"):
        train(store, trainer={"where": "margin > 99"})
    with pytest.raises(ConfigError, match=r"no stored pair matches `trainer\.eval_where`"):
        train(store, name="b", trainer={"eval_where": "margin > 99"})


def test_what_does_not_go_with_pairs_is_refused_before_any_work(store: Store) -> None:
    online: dict[str, Any] = {
        "explorer": {"rewards": "support.tiny_models:share_of_ones"},
        "tasks": SUMS,
        "trainer": {"steps": 1},
    }
    with pytest.raises(ConfigError, match=r"`dpo` learns from stored preferences, which an"):
        run_module.run(store, offline(algorithm="dpo", **online))
    with pytest.raises(
        ConfigError, match=r"`trainer\.priority_update` is for rows, and `dpo` draws"
    ):
        train(store, trainer={"priority_update": "surprise"})
    prefer(store, 3)
    mixed = {"a": {"share": 0.5, "run": "r"}, "b": {"share": 0.5, "source": "SELECT 1"}}
    with pytest.raises(ConfigError, match="pairs have no run; choose them by"):
        train(store, trainer={"sampler": {"mixed": mixed}, "steps": 1})
    assert store.count("draws") == 0


PAIRED = ("dpo", "ipo", "simpo", "orpo", "kto", "reward_model")


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRED)
def test_a_recipe_ranks_pairs_of_tasks_that_were_never_trained_on(store: Store, name: str) -> None:
    run(store, settings(f"{name}_digits"))
    accuracy, loss = metric(store, "eval/accuracy"), metric(store, "eval/loss")
    last = max(accuracy)
    assert accuracy[0] <= 0.5
    assert accuracy[last] >= accuracy[0] + 0.2
    assert loss[last] < loss[0]
    held = "SELECT task_id FROM tasks WHERE split = 'eval'"
    trained = "SELECT task_id FROM experiences JOIN draws USING (experience_id)"
    assert store.sql(f"{trained} WHERE task_id IN ({held})").fetchall() == []

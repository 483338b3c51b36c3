"""Training on rows again: by priority, from several sources, from queries, with other rewards."""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.tiny_models import config, offline, table, written

import rlake
from rlake.loop.config import RunConfig
from rlake.loop.report.summary import summary
from rlake.loop.run import run
from rlake.loop.trainer.redraw import rebuild
from rlake.store import Store
from rlake.store.errors import ConfigError, JobError, QueryError, StarvedError
from rlake.store.lineage.policy import of_policy
from rlake.store.verify_draws import verify

BY_SURPRISE = {
    "side_columns": ["priority=derived:priority"],
    "sampler": {"prioritized": {"alpha": 0.7, "beta": 0.5}},
    "priority_update": "0.1 + surprise",
}


def draws(store: Store) -> pl.DataFrame:
    return table(
        store,
        "draws_current d JOIN experiences e USING (experience_id) ORDER BY d.step, position",
        "d.*, e.policy_version, e.batch, e.group_id, e.run_id AS made_by",
    )


def is_proven(store: Store, steps: int, *, run_id: str = "demo") -> bool:
    """Whether each step's rows are unchanged, and are drawn again the same."""
    proofs = [(verify(store, run_id, s), rebuild(store, run_id, s)) for s in range(1, steps + 1)]
    return all(rows.holds and again.is_same for rows, again in proofs)


# with an explorer


REPLAYS: list[dict[str, Any]] = [
    {"max_uses": 3},
    {"max_uses": 2, "sampler": "uniform"},
    {"max_uses": 3, **BY_SURPRISE},
    {
        "max_uses": 2,
        "sampler": {"prioritized": {"priority": "exp(-0.5 * age) / (1 + times_drawn)"}},
    },
]


@pytest.mark.parametrize("trainer", REPLAYS, ids=["fifo", "uniform", "surprise", "age"])
def test_a_replay_draws_fresh_rows_again_and_every_step_can_be_proven(
    store: Store, trainer: dict[str, Any]
) -> None:
    run(store, config(trainer={"steps": 4, "batch_size": 4, **trainer}, schedule={"max_lag": 3}))
    drawn = draws(store)
    assert drawn["step"].unique().sort().to_list() == list(range(1, 5))
    assert (drawn["lag"] <= 3).all()
    times = drawn.group_by("experience_id").len()["len"]
    assert 1 < times.max() <= trainer["max_uses"]  # type: ignore[operator]
    made = store.sql("SELECT count(DISTINCT group_id) FROM experiences").fetchall()[0][0]
    later = -(-4 // trainer["max_uses"])
    assert made < 4 * 4, "rows that are drawn again need not be made"
    assert made >= 4 + 3 * later
    assert is_proven(store, 4)


def test_weights_make_up_for_priorities(store: Store) -> None:
    trainer = {"steps": 5, "batch_size": 3, "max_uses": 3, **BY_SURPRISE}
    run(store, config(trainer=trainer, schedule={"max_lag": 9}))
    drawn = draws(store)
    assert drawn["weight"].max() == 1.0
    assert drawn.filter(pl.col("step") > 2)["weight"].n_unique() > 1
    derived = table(store, "experience_values ORDER BY step, experience_id")
    assert derived["name"].unique().to_list() == ["priority"]
    assert set(derived["step"]) == {1, 2, 3, 4, 5}
    assert (derived["value"] > 0.1).all()
    assert set(derived["experience_id"]) == set(drawn["experience_id"])


def test_expert_rows_are_mixed_in_with_their_share_and_the_source_is_on_record(
    store: Store,
) -> None:
    experts = written(12, group_size=3, source="expert", run_id="gold", batch=1)
    store.append("experiences", experts)
    mixed = {"expert": {"share": 0.5, "run": "gold", "sampler": "uniform"}, "own": {"share": 0.5}}
    trainer = {"steps": 6, "batch_size": 3, "sampler": {"mixed": mixed}}
    run(store, config(trainer=trainer))
    drawn = draws(store)
    by_source = drawn.group_by("source").agg(pl.col("group_id").n_unique(), pl.len()).sort("source")
    assert by_source["len"].to_list() == [27, 27], "nine groups of three each, half of 18"
    assert set(drawn.filter(source="expert")["made_by"]) == {"gold"}
    assert set(drawn.filter(source="own")["made_by"]) == {"demo"}
    own = drawn.filter(source="own")
    assert set(Counter(own["experience_id"]).values()) == {1}
    assert set(own["lag"]) == {0}, "the explorer keeps pace with its share"
    made = "SELECT count(DISTINCT group_id) FROM experiences WHERE run_id = 'demo'"
    assert store.sql(made).fetchall() == [(12,)], "six batches of what a step takes at most"
    assert is_proven(store, 6)


def test_a_replay_that_is_interrupted_goes_on_as_if_it_had_not_been(
    tmp_path: Path, empty_store: Path
) -> None:
    trainer = {"steps": 6, "batch_size": 3, "max_uses": 2, "checkpoint_every": 3, **BY_SURPRISE}
    settings = config(trainer=trainer, schedule={"max_lag": 3, "max_ahead": 1})
    stores = [shutil.copytree(empty_store, tmp_path / name) for name in ("whole", "parts")]
    whole, parts = (rlake.connect(place) for place in stores)
    run(whole, settings)

    def stop_after(job: str, step: int, values: object) -> None:
        if job == "train" and step == 5:
            raise JobError("enough")

    with pytest.raises(JobError, match="enough"):
        run(parts, settings, listener=stop_after)
    run(parts, settings, resume=True)
    told = ("step", "experience_id", "weight", "lag", "advantage", "epoch", "digest")
    assert draws(parts).select(told).equals(draws(whole).select(told))
    digests = "policies_current ORDER BY policy_version"
    assert table(parts, digests, "digest").equals(table(whole, digests, "digest"))
    assert is_proven(parts, 6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer": {"max_uses": 2}}, r"schedule.max_lag is missing; a run that draws rows again"),
        ({"trainer": {"source": "SELECT 1"}}, "trainer.source is for runs on what is stored"),
        ({"trainer": {"at": "then"}}, "trainer.at is for runs on what is stored"),
        (
            {"trainer": {"sampler": "unifrom"}},
            "sampler `unifrom` does not exist; did you mean `uniform`",
        ),
        (
            {"trainer": {"sampler": {"fifo": {}, "uniform": {}}}},
            "a sampler is one of fifo, uniform, prioritized, mixed, got `fifo` and `uniform`",
        ),
        (
            {"trainer": {"sampler": {"mixed": {"a": {"share": 0.5}, "b": {"share": 0.4}}}}},
            "the shares of `mixed` add up to 0.9, expected 1: a 0.5, b 0.4",
        ),
        (
            {"trainer": {"sampler": {"mixed": {"a": {"share": 0.5}, "b": {"share": 0.5}}}}},
            "trainer.sampler.mixed has 2 sources of the run's own rows",
        ),
        (
            {"explorer": None, "schedule": {"new_units_per_step": 2}},
            "schedule.new_units_per_step is for runs with an explorer",
        ),
    ],
)
def test_draws_that_make_no_sense_are_refused_before_any_work(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**changes)


# on what is stored


def train(store: Store, **changes: Any) -> pl.DataFrame:
    run(store, offline(**changes))
    return draws(store)


def test_any_query_can_be_trained_on(store: Store) -> None:
    store.append("experiences", written(12))
    query = "SELECT experience_id FROM experiences e JOIN groups USING (group_id) WHERE reward = 1"
    drawn = train(store, trainer={"source": query, "batch_size": 3})
    assert sorted(drawn["experience_id"]) == [
        i for (i,) in store.sql(f"{query} ORDER BY ALL").fetchall()
    ]
    assert is_proven(store, 2)


def test_a_snapshot_is_trained_on_as_it_was(store: Store) -> None:
    store.append("experiences", written(4))
    store.snapshot("then")
    store.append("experiences", written(8)[4:])
    drawn = train(store, trainer={"at": "then", "batch_size": 2})
    assert sorted(drawn["experience_id"]) == [r.experience_id for r in written(4)]


def test_another_reward_than_the_stored_one_is_trained_on(store: Store) -> None:
    rows = written(6, group_size=3)
    store.append("experiences", rows)
    strict = [0.0, 1.0, 5.0, 2.0, 2.0, 2.0]
    scores: Sequence[dict[str, Any]] = [
        {"experience_id": r.experience_id, "scorer": "strict", "scorer_version": "2", "value": v}
        for r, v in zip(rows, strict, strict=True)
    ]
    store.append("scores", scores)
    drawn = train(
        store,
        algorithm={"grpo": {"group_size": 3}},
        trainer={"side_columns": ["reward=score:strict@2"], "batch_size": 2, "steps": 1},
    )
    credit = dict(zip(drawn["experience_id"], drawn["advantage"], strict=True))
    mean, deviation = 2.0, 7.0**0.5
    told = [credit[str(r.experience_id)] for r in rows]
    assert told[:3] == pytest.approx([(v - mean) / deviation for v in strict[:3]], rel=1e-4)
    assert told[3:] == pytest.approx([0.0] * 3)
    [reward] = table(store, "metrics WHERE name = 'train/reward_mean'", "value")["value"]
    assert reward == pytest.approx(2.0)
    assert is_proven(store, 1)


def test_a_reward_that_nobody_gave_is_refused_with_the_nearest(store: Store) -> None:
    store.append("experiences", written(2))
    [row] = [{"experience_id": "g000/00", "scorer": "strict", "scorer_version": "2", "value": 1.0}]
    store.append("scores", [row])
    with pytest.raises(LookupError, match="`strikt`; did you mean `strict`"):
        train(store, trainer={"side_columns": ["reward=score:strikt"]})
    assert store.count("draws") == store.count("job_events") == 0


def test_stored_rows_are_drawn_by_priority_with_weights(store: Store) -> None:
    rows = [*written(8, priority=0.0), *written(8, priority=1.0, batch=2)]
    named = [
        {**vars(r), "experience_id": f"{i:02d}", "group_id": f"g{i:02d}"}
        for i, r in enumerate(rows)
    ]
    store.append("experiences", [rlake.Experience(**r) for r in named])
    drawn = train(
        store, trainer={"steps": 4, "batch_size": 2, "sampler": {"prioritized": {"beta": 1.0}}}
    )
    assert sorted(drawn["experience_id"]) == [f"{i:02d}" for i in range(8, 16)]
    assert set(drawn["weight"]) == {1.0}, "equal chances weigh the same"
    assert json.loads(drawn["sampler"][0])["strategy"] == "prioritized"
    assert is_proven(store, 4)


def test_an_offline_replay_goes_by_the_priorities_that_its_own_steps_give(store: Store) -> None:
    rows = [
        rlake.Experience(**{**vars(r), "experience_id": f"{i:02d}", "group_id": f"g{i:02d}"})
        for i, r in enumerate(written(8))
    ]
    store.append("experiences", rows)
    trainer = {
        "steps": 8,
        "batch_size": 2,
        "max_uses": 8,
        "side_columns": ["priority=derived:priority"],
        "sampler": {"prioritized": {}},
        "priority_update": "CASE WHEN experience_id IN ('03', '05') THEN 1 ELSE 0 END",
    }
    drawn = train(store, trainer=trainer)
    told = [set(part["experience_id"]) for part in drawn.partition_by("step")]
    seen = [set[str]().union(*told[:i]) for i in range(len(told))]
    allowed = [
        {"03", "05"} | ({f"{i:02d}" for i in range(8)} - before) for before in seen
    ]  # rows that no step has judged yet weigh as much as the heaviest
    assert all(step <= may for step, may in zip(told, allowed, strict=True))
    assert told[-1] == {"03", "05"}
    assert is_proven(store, 8)


def test_stored_sources_are_mixed_too(store: Store) -> None:
    store.append("experiences", written(6, run_id="a", batch=1))
    others = [
        rlake.Experience(**{**vars(r), "experience_id": f"b/{i}", "group_id": "b"})
        for i, r in enumerate(written(6, run_id="b", batch=1))
    ]
    store.append("experiences", others)
    mixed = {
        "a": {"share": 0.25, "run": "a", "max_uses": 1},
        "b": {"share": 0.75, "run": "b", "sampler": "uniform"},
    }
    drawn = train(store, trainer={"steps": 4, "batch_size": 4, "sampler": {"mixed": mixed}})
    assert Counter(drawn["made_by"]) == {"a": 4, "b": 12}
    assert is_proven(store, 4)


@pytest.mark.parametrize(
    ("trainer", "error", "words"),
    [
        ({"priority_update": "abs(advantge)"}, QueryError, "`trainer.priority_update`.*`advantge`"),
        ({"priority_update": "'high'"}, QueryError, "must be a number, got string"),
        ({"priority_update": "reward - 2"}, JobError, "is -2.0 for experience `g000/00`"),
        ({"sampler": {"prioritized": {"priority": "reward >"}}}, QueryError, "does not parse"),
        ({"sampler": {"prioritized": {"priority": "reward - 1"}}}, QueryError, "is -1.0 for"),
        ({"source": "SELECT 'nobody' AS experience_id"}, QueryError, "nobody|not in the store|1"),
        ({"source": "SELECT reward FROM experiences"}, QueryError, "experience_id"),
        ({"at": "never"}, LookupError, "no snapshot `never`"),
    ],
)
def test_draws_that_cannot_be_made_say_why(
    store: Store, trainer: dict[str, Any], error: type[Exception], words: str
) -> None:
    store.append("experiences", written(4))
    with pytest.raises(error, match=words):
        train(store, trainer={"steps": 1, **trainer})


def test_a_step_that_priorities_leave_empty_says_so(store: Store) -> None:
    store.append("experiences", written(4))
    sampler = {"prioritized": {"priority": "0 * reward"}}
    with pytest.raises((ConfigError, StarvedError, QueryError), match="4 of priority 0"):
        train(store, trainer={"steps": 1, "batch_size": 2, "sampler": sampler})


# what can never be drawn


def starving(store: Store, mixed: dict[str, Any] | None = None, **trainer: Any) -> RunConfig:
    """Build a run that explores, and whose trainer waits in vain for a second at most."""
    if mixed is not None:
        trainer["sampler"] = {"mixed": {"own": {"share": 0.5}, "other": {"share": 0.5, **mixed}}}
    return config(trainer=trainer, schedule={"timeout": 1, "max_ahead": 0})


def test_a_source_that_can_never_be_filled_is_refused_before_any_work(store: Store) -> None:
    store.append("experiences", written(4, run_id="golden", batch=1))
    store.snapshot("small")
    with pytest.raises(ConfigError, match=r"run `goldne`, of which nothing.*did you mean `golden`"):
        run(store, starving(store, {"run": "goldne"}))
    with pytest.raises(QueryError, match="source `other`: such a step can never be drawn"):
        run(store, starving(store, {"at": "small"}, batch_size=6))
    assert store.sql("SELECT count(*) FROM draws").fetchall() == [(0,)]


def test_who_waits_in_vain_is_told_what_leaves_the_rows_out(store: Store) -> None:
    store.append("experiences", written(4, run_id="demo", batch=1))
    with pytest.raises(StarvedError, match=r"of [1-9][0-9]* stored rows `where` or their `drop_re"):
        run(store, starving(store, where="reward > 5"))


def test_who_waits_in_vain_is_told_which_source_has_too_few(store: Store) -> None:
    nothing = "SELECT experience_id FROM experiences WHERE false"
    with pytest.raises(StarvedError, match="nothing in this run adds rows to source `other`"):
        run(store, starving(store, {"source": nothing}))


def test_priorities_of_0_are_what_an_online_step_that_starves_names(store: Store) -> None:
    settings = config(
        trainer={"sampler": {"prioritized": {"priority": "0"}}}, schedule={"max_lag": 2}
    )
    with pytest.raises(StarvedError, match="of priority 0; give some of them a priority above 0"):
        run(store, settings)


# other values of a name


def strict(store: Store, values: dict[str, float], version: str = "2") -> None:
    """Store what a stricter scorer says."""
    scores: Sequence[dict[str, Any]] = [
        {"experience_id": i, "scorer": "strict", "scorer_version": version, "value": value}
        for i, value in values.items()
    ]
    store.append("scores", scores)


def lenient(store: Store, n: int = 48) -> set[str]:
    """Store rows of reward 1, of which a stricter scorer lets only every twelfth pass."""
    rows = written(n, reward=1.0)
    store.append("experiences", rows)
    passed = {str(r.experience_id) for r in rows[::12]}
    strict(store, {str(r.experience_id): float(r.experience_id in passed) for r in rows})
    return passed


REPLACED = {"side_columns": ["reward=score:strict@2"], "batch_size": 2}
WAYS: list[dict[str, Any]] = [
    {"where": "reward >= 1"},
    {"where": "REWARD >= 1"},
    {"where": "experience_id IN (SELECT experience_id FROM experiences WHERE reward >= 1)"},
    {"source": "SELECT experience_id FROM experiences WHERE reward >= 1"},
    {"sampler": {"prioritized": {"priority": "reward"}}},
    {"sampler": {"prioritized": {"priority": "reward / (1 + times_drawn)"}}},
    {
        "steps": 2,
        "sampler": {
            "mixed": {
                "a": {"share": 0.5, "where": "reward >= 1 AND rollout_index = 0", "max_uses": 1},
                "b": {"share": 0.5, "source": "SELECT experience_id FROM experiences "
                      "WHERE reward = 1", "max_uses": 1},
            }
        },
    },
]  # fmt: skip


@pytest.mark.parametrize("trainer", WAYS, ids=lambda way: json.dumps(way)[:40])
def test_a_replaced_reward_is_what_every_choice_of_rows_sees(
    store: Store, trainer: dict[str, Any]
) -> None:
    passed = lenient(store)
    drawn = train(store, trainer={**REPLACED, **trainer})
    assert set(drawn["experience_id"]) <= passed
    assert drawn["experience_id"].n_unique() == len(passed) or "mixed" in json.dumps(trainer)
    assert set(drawn["replaced"].explode().struct.field("value")) == {1.0}
    assert is_proven(store, drawn["step"].max())  # type: ignore[arg-type]


def test_a_replaced_reward_is_what_metrics_and_summaries_say(store: Store) -> None:
    lenient(store)
    settings = offline(trainer={**REPLACED, "batch_size": 24, "priority_update": "reward"})
    run(store, settings)
    [(reward,), (last,)] = store.sql("SELECT reward_mean FROM steps ORDER BY step").fetchall()
    assert (reward, last) == (2 / 24, 2 / 24)
    assert summary(store, settings.name)["final_reward"] == 2 / 24
    assert set(table(store, "metrics WHERE name = 'train/reward_mean'", "value")["value"]) == {
        2 / 24
    }
    [(given,)] = store.sql(
        "SELECT sum(value) FROM experience_values WHERE name = 'priority'"
    ).fetchall()
    assert given == 4
    assert of_policy(store, "demo", 2).rows["reward_mean"] == 4 / 48


def test_groups_are_chosen_by_the_reward_that_replaces_theirs(store: Store) -> None:
    rows = written(12, group_size=3, reward=1.0)
    store.append("experiences", rows)
    values = [0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    strict(store, {str(r.experience_id): v for r, v in zip(rows, values, strict=True)})
    flat = "SELECT experience_id FROM experiences JOIN groups USING (group_id) WHERE reward_std > 0"
    drawn = train(
        store, algorithm={"grpo": {"group_size": 3}}, trainer={**REPLACED, "source": flat}
    )
    assert set(drawn["experience_id"].str.head(4)) == {"g000", "g003"}

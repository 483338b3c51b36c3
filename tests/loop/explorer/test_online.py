"""Explorer and trainer together: what is drawn, how old it is, and how failures end both."""

import gc
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support import runs
from support.builders import line_of, task
from support.tiny_models import config, share_of_ones, table

import rlake
from rlake.loop import run as loop_run
from rlake.loop.config import RunConfig
from rlake.loop.explorer import batched
from rlake.loop.run import explore, run, train
from rlake.loop.runs.job import OtherJobError
from rlake.loop.runs.metrics import Listener
from rlake.store import Experience, Store
from rlake.store.changes import CREATED
from rlake.store.errors import ConfigError, JobError, StarvedError


def trained(store: Store, **changes: Any) -> pl.DataFrame:
    """Run, and return what was drawn, in order, with the rows' own columns."""
    run(store, config(**changes))
    return drawn(store)


def drawn(store: Store) -> pl.DataFrame:
    return table(
        store,
        "draws_current d JOIN experiences e USING (experience_id) ORDER BY d.step, position",
        "d.*, e.policy_version, e.batch, e.group_id, e.reward, e.num_tokens",
    )


def test_a_run_checks_and_makes_its_tasks_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str) -> None:
        original = getattr(loop_run, name)

        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return original(*args, **options)

        monkeypatch.setattr(loop_run, name, call)

    for name in ("check", "prepare", "resolve_run_models"):
        counted(name)
    loop_run.run(store, config())
    assert calls == {"check": 1, "prepare": 1, "resolve_run_models": 1}


SCHEDULES = [
    {},
    {"max_ahead": 1},
    {"max_ahead": 2, "publish_every": 2},
    {"max_ahead": 1, "publish_every": 2},
    {"max_ahead": 0, "max_lag": 2},
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_no_row_is_older_than_max_lag_and_each_is_drawn_once(
    store: Store, schedule: dict[str, int]
) -> None:
    settings = config(schedule=schedule)
    rows = trained(store, schedule=schedule, trainer={"steps": 6})
    assert rows["step"].unique().sort().to_list() == list(range(1, 7))
    assert rows.group_by("step").len()["len"].to_list() == [6] * 6  # two groups of three
    assert set(Counter(rows["experience_id"]).values()) == {1}
    assert rows["lag"].to_list() == (rows["step"] - 1 - rows["policy_version"]).to_list()
    assert rows["lag"].min() >= 0  # type: ignore[operator]
    assert rows["lag"].max() <= settings.schedule.lag  # type: ignore[operator]
    ahead, every = settings.schedule.max_ahead, settings.schedule.publish_every
    expected = [max(0, b - 1 - ahead) // every * every for b in rows["batch"]]
    assert rows["policy_version"].to_list() == expected


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_on_policy_every_row_was_written_by_the_weights_that_it_updates_at_any_temperature(
    store: Store, temperature: float
) -> None:
    rows = trained(store, explorer={"sampling": {"temperature": temperature, "max_tokens": 3}})
    assert set(rows["lag"]) == {0}
    ratios = table(store, "metrics WHERE name = 'train/ratio'", "value")["value"].to_list()
    assert ratios == pytest.approx([1.0] * 3, abs=1e-4)


def test_greedy_tries_can_be_imitated(store: Store) -> None:
    rows = trained(
        store,
        algorithm="sft",
        explorer={"sampling": {"temperature": 0, "max_tokens": 3}},
        trainer={"batch_size": 3},
    )
    assert rows.height == 9
    losses = table(store, "metrics WHERE name = 'train/loss'", "value")["value"]
    assert losses.null_count() == 0


Elsewhere = Callable[[], Store]
Default = tuple[Store, dict[str, list[tuple[object, ...]]], list[tuple[str, int]]]


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Elsewhere:
    """Make another store without rows."""

    def make() -> Store:
        folder = tmp_path_factory.mktemp("elsewhere") / "store"
        shutil.copytree(empty_store, folder)
        return rlake.connect(folder)

    return make


def told(
    store: Store, *, listener: Listener | None = None, **changes: Any
) -> dict[str, list[tuple[object, ...]]]:
    """Run, and return all that two equal runs must agree on."""
    run(store, config(**changes), listener=listener)
    queries = {
        "tokens": "SELECT experience_id, token_ids, logprobs FROM experiences ORDER BY 1",
        "draws": "SELECT step, position, experience_id, weight, lag, advantage, digest "
        "FROM draws ORDER BY step, position",
        "losses": "SELECT step, value FROM metrics WHERE name = 'train/loss' ORDER BY step",
        "weights": "SELECT policy_version, digest FROM policies ORDER BY policy_version",
    }
    return {name: store.sql(query).fetchall() for name, query in queries.items()}


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Default:
    """A run of the default configuration, what it tells, and what its listener heard."""
    heard: list[tuple[str, int]] = []
    store = rlake.connect(shutil.copytree(empty_store, tmp_path_factory.mktemp("default") / "lake"))
    found = told(store, listener=lambda job, step, values: heard.append((job, step)))
    return store, found, heard


def test_rows_that_went_stale_before_they_were_needed_are_left_and_not_drawn(store: Store) -> None:
    """Three groups a batch, two a step: on policy, the third is never young enough."""
    rows = trained(store, explorer={"tasks_per_batch": 3}, trainer={"steps": 4})
    assert set(rows["lag"]) == {0}
    assert rows.height == 4 * 6
    assert store.count("experiences") == 4 * 9


def test_the_same_configuration_gives_the_same_run_in_any_store(elsewhere: Elsewhere) -> None:
    one, two = (told(elsewhere(), schedule={"max_ahead": 1}) for _ in range(2))
    assert one == two
    assert len({value for _, value in one["losses"]}) > 1


def test_another_seed_gives_other_weights_and_other_tries(store: Store, default: Default) -> None:
    one, two = default[1], told(store, seed=1)
    assert one["weights"][0] != two["weights"][0]
    assert one["tokens"] != two["tokens"]


def test_both_jobs_write_down_how_it_went(default: Default) -> None:
    store, _, seen = default
    metrics = table(store, "metrics")
    by_job = {
        str(job): set(names)
        for job, names in metrics.group_by("job").agg(pl.col("name").unique()).rows()
    }
    trained = "loss ratio clip_fraction kl entropy grad_norm reward_mean lag_max rows tokens"
    explored = "rows failed_rows unscored_rows reward_mean sampled_tokens"
    assert by_job["train"] >= {f"train/{name}" for name in trained.split()}
    assert by_job["explore"] >= {f"explore/{name}" for name in explored.split()}
    assert set(metrics.filter(pl.col("job") == "train")["step"]) == {1, 2, 3}
    assert sorted(seen) == [("explore", b) for b in (1, 2, 3)] + [("train", s) for s in (1, 2, 3)]
    jobs = table(store, "runs", "job, status").rows()
    assert sorted(jobs) == [("explore", "done"), ("train", "done")]
    sampled = store.sql("SELECT sum(len(list_filter(loss_mask, lambda x: x))) FROM experiences")
    counted = metrics.filter(pl.col("name") == "explore/sampled_tokens")["value"].sum()
    assert sampled.fetchall() == [(counted,)]


def test_many_small_commits_give_the_rows_of_one_big_one(store: Store, default: Default) -> None:
    whole, parts = default[1], told(store, explorer={"tasks_per_chunk": 1})
    first = [(name, tokens) for name, tokens, _ in whole["tokens"] if "/000001/" in str(name)]
    assert len(first) == 6
    assert first == [(name, tokens) for name, tokens, _ in parts["tokens"][:6]]
    assert [row[:3] for row in whole["draws"]] == [row[:3] for row in parts["draws"]]


def test_tries_at_single_rows_are_counted_as_rows(store: Store) -> None:
    rows = trained(store, algorithm="sft", explorer={"group_size": 2}, trainer={"batch_size": 4})
    assert rows.group_by("step").len()["len"].to_list() == [4, 4, 4]
    assert store.count("experiences") == 12


def test_tries_that_fail_are_rows_and_the_run_goes_on_with_the_others(store: Store) -> None:
    rows = trained(
        store, explorer={"workflow": "support.runs:fails_on_even", "max_failed_batches": 9}
    )
    failed = table(store, "experiences WHERE drop_reason IS NOT NULL")
    assert failed.height > 0
    assert set(failed["drop_reason"]) == {
        f"workflow failed: ValueError: no even sums today {line_of(runs.__file__, 'no even sums')}"
    }
    assert not set(failed["experience_id"]) & set(rows["experience_id"])
    assert rows.group_by("step").len()["len"].to_list() == [6] * 3
    assert set(rows["lag"]) == {0}


def test_rows_without_reward_are_drawn_with_their_group_and_not_trained_on(store: Store) -> None:
    rows = trained(store, explorer={"rewards": "support.runs:unsure"})
    nothing = rows.filter(pl.col("reward").is_null())
    assert nothing.height > 0
    assert set(nothing["weight"]) == {0.0}
    assert nothing["advantage"].null_count() == nothing.height
    assert set(rows.filter(pl.col("reward").is_not_null())["weight"]) == {1.0}


@pytest.mark.parametrize(
    ("explorer", "batches", "said", "raised"),
    [
        (
            {"workflow": "support.runs:fails", "max_failed_batches": 2},
            2,
            "2 batches in a row gave no usable row; the last: workflow failed: OSError: no sandbox",
            "no sandbox",
        ),
        (
            {"rewards": "support.runs:mistaken"},
            3,
            "3 batches in a row gave no usable row; the last: reward `mistaken` failed: "
            "ValueError: a mistake",
            "a mistake",
        ),
    ],
)
def test_an_explorer_that_always_fails_ends_the_run_soon_and_both_jobs_say_why(
    store: Store, explorer: dict[str, Any], batches: int, said: str, raised: str
) -> None:
    began = time.monotonic()
    with pytest.raises(JobError) as caught:
        run(store, config(explorer=explorer))
    assert time.monotonic() - began < 15  # wait_seconds is 60
    said = f"{said} {line_of(runs.__file__, raised)}"
    said += "; fix it, then continue with `--resume` (`resume=True` in Python)"
    assert str(caught.value) == said
    jobs = {row["job"]: row for row in table(store, "runs").to_dicts()}
    assert jobs["explore"]["status"] == jobs["train"]["status"] == "failed"
    assert jobs["explore"]["error"] == said
    assert store.count("experiences") == batches * 6
    assert store.count("draws") == 0


def test_a_run_whose_rollouts_all_failed_is_resumed_with_another_reward(store: Store) -> None:
    with pytest.raises(JobError):
        run(store, config(explorer={"rewards": "support.runs:mistaken"}))
    run(store, config(), resume=True)
    assert store.count("draws") == 3 * 6
    with pytest.raises(ConfigError, match=r"started with another `explorer\.rewards"):
        run(store, config(explorer={"rewards": "support.runs:mistaken"}), resume=True)


def test_a_trainer_that_fails_ends_the_run_with_its_own_error(store: Store) -> None:
    with pytest.raises(JobError, match=r"^3 steps in a row have a loss or gradient that"):
        run(store, config(algorithm="support.runs:Explodes", trainer={"steps": 5}))
    jobs = {row["job"]: row["status"] for row in table(store, "runs").to_dicts()}
    assert jobs == {"explore": "failed", "train": "failed"}


def test_a_condition_that_no_row_meets_ends_the_run_within_its_wait(store: Store) -> None:
    with pytest.raises(StarvedError) as caught:
        run(store, config(trainer={"where": "reward > 5"}, schedule={"timeout": 3}))
    said = str(caught.value)
    assert said.startswith("gave up after 3 s: step 1 of run `demo`: need 2 groups, have 0 fresh")
    jobs = {row["job"]: row["status"] for row in table(store, "runs").to_dicts()}
    assert jobs == {"explore": "failed", "train": "failed"}


def test_an_explorer_ends_when_its_trainer_fails_also_when_it_waits_for_nothing(
    store: Store,
) -> None:
    """No row may be drawn, so the explorer goes on with the weights that it has."""
    settings = config(trainer={"where": "reward > 5"}, schedule={"timeout": 3})
    errors: list[Exception] = []

    def beside() -> None:
        try:
            store.wait_for(  # or it might itself wait in vain for the first weights
                lambda: store.count("policies") or None,
                tables=("policies",),
                seconds=60,
                describe=lambda: "no weights were published",
            )
            explore(store, settings)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is looked at below
            errors.append(error)

    thread = threading.Thread(target=beside)
    thread.start()
    with pytest.raises(StarvedError, match="gave up after 3 s: step 1 of run `demo`"):
        train(store, settings)
    thread.join(100)
    assert not thread.is_alive()
    [error] = errors
    assert isinstance(error, OtherJobError)
    assert "`train` of run `demo` failed: gave up after 3 s" in str(error)


def test_a_trainer_or_an_explorer_alone_says_what_it_waits_for(elsewhere: Elsewhere) -> None:
    alone = config(schedule={"timeout": 0.3})
    waits = r"gave up after 0.3 s: step 1 of run `demo`: need 2 groups, have 0.*explorer running\?"
    with pytest.raises(StarvedError, match=waits):
        train(elsewhere(), alone)
    with pytest.raises(StarvedError, match="needs policy version 0 of run `demo`, newest is None"):
        explore(elsewhere(), alone)


def test_without_tasks_nothing_is_started(store: Store) -> None:
    with pytest.raises(ConfigError, match=r"no task matches `split = 'nowhere'`"):
        run(store, config(tasks={"where": "split = 'nowhere'"}))
    assert store.count("job_events") == 0, "else the run's name could not be used again"


def test_rows_of_other_runs_and_what_is_only_measured_are_not_drawn(store: Store) -> None:
    store.append("tasks", [task(1)])
    run(store, config(name="before"))
    held = "run_id = 'before' OR rollout_index = 0"
    rows = trained(store, trainer={"eval_where": held})
    pairs = rows.select("experience_id", "run_id").rows()
    assert all(name.startswith(f"{run_id}/") for name, run_id in pairs)
    rows = rows.filter(pl.col("run_id") == "demo")
    assert set(rows["experience_id"].str.slice(-2)) == {"01", "02"}
    assert store.sql("SELECT count(*) FROM metrics WHERE name = 'eval/loss'").fetchall() == [(2,)]


def test_versions_are_published_as_the_schedule_says_each_with_the_one_before(store: Store) -> None:
    run(store, config(schedule={"max_ahead": 1, "publish_every": 2}, trainer={"steps": 5}))
    rows = store.sql("SELECT policy_version, parent_version FROM policies ORDER BY 1").fetchall()
    assert rows == [(0, None), (2, 0), (4, 2), (5, 4)]


def test_a_run_whose_rewards_are_all_equal_warns_that_nothing_was_learned(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def half(task: rlake.Task, experience: Experience) -> float:
        return 0.5

    run(store, config(explorer={"rewards": half}))
    [told] = [r.getMessage() for r in caplog.records if "had a gradient" in r.getMessage()]
    assert told.startswith("no step from 1 to 3 had a gradient, so nothing was learned")


def test_reward_rises(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """The reward is the share of the digit 1: a policy gradient cannot but find it."""
    trainer = {"steps": 25, "batch_size": 4, "learning_rate": 3e-2}
    run(store, config(algorithm={"grpo": {"group_size": 8}}, trainer=trainer))
    assert "had a gradient" not in caplog.text
    rewards = [r for (r,) in store.sql("SELECT reward_mean FROM steps ORDER BY step").fetchall()]
    assert sum(rewards[-5:]) / 5 > rewards[0] + 0.3
    assert share_of_ones(None, Experience(task_id="t", response_text="111")) == 1


def test_a_try_that_never_returns_becomes_a_row_and_the_job_ends(store: Store) -> None:
    never = {"workflow": "support.runs:never_returns", "max_failed_batches": 1}
    with pytest.raises(JobError, match=r"it took longer than 0\.2 s"):
        run(store, config(explorer={**never, "rollout_timeout": 0.2}))
    reasons = set(table(store, "experiences", "drop_reason")["drop_reason"])
    assert reasons == {"workflow failed: it took longer than 0.2 s"}


def test_tries_under_way_do_not_hold_up_a_run_that_failed(store: Store) -> None:
    began = time.monotonic()
    stuck = config(explorer={"workflow": "support.runs:never_returns"}, schedule={"timeout": 3})
    with pytest.raises(StarvedError, match="gave up after 3 s: step 1"):
        run(store, stuck)
    assert time.monotonic() - began < 20


def commits(store: Store) -> list[int]:
    """Return how many rows each commit to `experiences` stored, in order."""
    rows = pl.DataFrame(pl.from_arrow(store.dataset("experiences").to_table(columns=[CREATED])))
    return rows.group_by(CREATED).len().sort(CREATED)["len"].to_list()


def one_batch_whose_second_group_waits(
    monkeypatch: pytest.MonkeyPatch, **explorer: Any
) -> tuple[RunConfig, threading.Event]:
    going_on = threading.Event()
    monkeypatch.setattr(runs, "LATER", ("/0001/", going_on))
    explorer = {"workflow": "support.runs:asks_again_later", **explorer}
    return config(explorer=explorer, trainer={"steps": 1}), going_on


def test_groups_that_end_soon_after_their_chunk_began_share_one_commit(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second group ends after the first, and both long before the time that they have."""
    monkeypatch.setattr(batched, "SHARED_SECONDS", 60.0)
    rewards = {"rewards": "support.runs:lets_later_ones_go"}
    settings, _ = one_batch_whose_second_group_waits(monkeypatch, **rewards)
    began = time.monotonic()
    run(store, settings)
    assert time.monotonic() - began < 50, "the groups waited although all had ended"
    assert commits(store) == [2 * 3 * 2]


def test_a_group_is_stored_while_a_slow_one_of_its_chunk_goes_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, going_on = one_batch_whose_second_group_waits(monkeypatch)

    def until_one_is_stored() -> None:
        store.wait_for(
            lambda: store.count("experiences") or None,
            tables=("experiences",),
            seconds=20,
            describe=lambda: "no group was stored",
        )
        going_on.set()

    thread = threading.Thread(target=until_one_is_stored)
    thread.start()
    run(store, settings)
    thread.join(30)
    assert commits(store) == [3 * 2, 3 * 2]
    assert table(store, "experiences", "drop_reason")["drop_reason"].null_count() == 12


def test_what_is_loaded_is_frozen_while_exploring_and_no_longer(store: Store) -> None:
    gc.unfreeze()
    run(store, config(explorer={"rewards": "support.runs:frozen_objects"}))
    assert table(store, "experiences", "reward")["reward"].min() > 0  # type: ignore[operator]
    assert gc.get_freeze_count() == 0


def test_an_explorer_that_fails_leaves_nothing_frozen(store: Store) -> None:
    gc.unfreeze()
    how = {"workflow": "support.runs:fails_and_counts_frozen", "max_failed_batches": 1}
    with pytest.raises(JobError, match=r"[1-9][0-9]* objects are frozen"):
        run(store, config(explorer=how))
    assert gc.get_freeze_count() == 0

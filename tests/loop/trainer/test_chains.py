"""A pipeline's chain in the explorer's and in the trainer's path: the same verdicts, on record."""

import threading
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.tiny_models import config, offline, written

import rlake
from rlake.loop.run import explore, run, train
from rlake.loop.trainer.redraw import rebuild
from rlake.operators import operator
from rlake.pipelines import Pipeline, Table
from rlake.store import Store
from rlake.store.errors import ConfigError, JobError, OperatorError

CHAIN: list[Any] = [
    {"drop_flat_groups": {"min_std": 0.3}},
    {"keep": {"where": "response_text NOT LIKE '%1+%'"}},
]
FOUR = {"steps": 1, "batch_size": 4}
VERDICTS = "SELECT experience_id, operator, reason FROM drops ORDER BY ALL"


@operator("derive")
def num_characters(*, per: float = 1.0) -> pl.Expr:
    return (pl.col("response_text").str.len_chars() / per).alias("num_characters")


@operator("clean")
def shorter_is_better(*, penalty: float = 0.125) -> pl.Expr:
    return pl.col("reward") - penalty * pl.col("response_text").str.len_chars()


@operator("derive", reads=("response_text",), writes=("first",))
def first_character() -> pl.Expr:
    return pl.col("response_text").str.head(1).alias("first")


@operator("augment", reads=("experience_id", "response_text"), reads_all=True, scope="row")
def copies() -> Any:
    def copy(frame: pl.LazyFrame) -> pl.LazyFrame:
        told = frame.filter(pl.col("response_text").is_not_null())
        none = pl.lit(None, pl.String)
        return told.with_columns(
            parent_id="experience_id", source=pl.lit("synthetic"), created_at=pl.lit(None)
        ).with_columns(experience_id=none, group_id=none)

    return copy


@operator("filter", scope="row")
def fails_on_ones() -> Any:
    def check(frame: pl.LazyFrame) -> pl.LazyFrame:
        return frame.map_batches(_refuse_ones)

    return check


def _refuse_ones(rows: pl.DataFrame) -> pl.DataFrame:
    if rows["response_text"].str.contains("1").any():
        raise ValueError("ones are not for me")
    return rows


def here(name: str) -> str:
    return f"{__name__}:{name}"


def lake(folder: Path, **changes: Any) -> Store:
    store = rlake.connect(folder)
    run(store, config(**changes))
    return store


def read(store: Store, query: str) -> list[tuple[Any, ...]]:
    return store.sql(query).fetchall()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A run without a chain."""
    return lake(tmp_path_factory.mktemp("plain") / "lake", trainer=FOUR)


def test_the_same_list_gives_the_same_verdicts_offline_exploring_and_training(
    tmp_path: Path, plain: Store
) -> None:
    Pipeline(name="p", source=Table("experiences"), operators=CHAIN).run(plain)
    verdicts = read(plain, VERDICTS)
    assert {op for _, op, _ in verdicts} == {"drop_flat_groups", "keep"}

    trained = lake(tmp_path / "trained", trainer={**FOUR, "operators": CHAIN})
    assert read(trained, VERDICTS) == verdicts
    out = {i for i, *_ in verdicts}
    drawn = dict(read(trained, "SELECT experience_id, weight FROM draws"))
    assert {i for i, weight in drawn.items() if weight == 0} == out
    assert len(drawn) == 12

    explored = lake(tmp_path / "explored", trainer=FOUR, explorer={"operators": CHAIN})
    batch = "FROM experiences WHERE batch = 1"
    said = read(explored, f"SELECT experience_id, drop_reason {batch} ORDER BY ALL")
    assert [(i, why) for i, why in said if why] == [(i, f"{o}: {why}") for i, o, why in verdicts]
    assert len(said) == 12
    assert not out & {
        i for (i,) in read(explored, "SELECT experience_id FROM draws WHERE weight > 0")
    }


def test_what_a_trainer_leaves_out_still_counts_in_its_groups_statistics(
    tmp_path: Path, plain: Store
) -> None:
    advantages = "SELECT experience_id, advantage FROM draws ORDER BY 1"
    part = lake(tmp_path / "part", trainer={**FOUR, "operators": CHAIN[1:]})
    assert read(part, advantages) == read(plain, advantages)
    assert read(part, "SELECT count(*) FROM draws WHERE weight = 0") != [(0,)]


def test_a_reward_that_the_chain_shapes_is_the_one_that_is_credited(tmp_path: Path) -> None:
    shaping = [{here("shorter_is_better"): {"penalty": 0.25}}]
    store = lake(tmp_path / "shaped", trainer={**FOUR, "operators": shaping})
    rows = store.sql(
        "SELECT group_id, d.advantage, reward - 0.25 * len(response_text) AS shaped "
        "FROM draws d JOIN experiences USING (experience_id)"
    ).pl()
    centred = pl.col("shaped") - pl.col("shaped").mean()
    expected = rows.with_columns(
        expected=(centred / (pl.col("shaped").std() + 1e-6)).over("group_id")
    ).filter(pl.col("advantage").is_not_null())
    assert expected["advantage"].to_list() == pytest.approx(
        expected["expected"].to_list(), abs=1e-4
    )
    assert expected["advantage"].abs().sum() > 0


def test_an_explorers_chain_sets_columns_and_metrics_and_adds_rows_of_no_run(
    tmp_path: Path,
) -> None:
    chain = [{here("num_characters"): {"per": 2.0}}, here("shorter_is_better"), here("copies")]
    store = lake(tmp_path / "lake", trainer=FOUR, explorer={"operators": chain})
    own = read(
        store,
        "SELECT metrics[1].name, metrics[1].value = len(response_text) / 2, "
        "abs(reward - (rewards[1].value - 0.125 * len(response_text))) < 1e-9 "
        "FROM experiences WHERE run_id = 'demo'",
    )
    assert set(own) == {("num_characters", True, True)}
    made = read(
        store,
        "SELECT count(*), count(run_id), count(DISTINCT parent_id), min(source) "
        "FROM experiences WHERE source = 'synthetic'",
    )
    assert made == [(len(own), 0, len(own), "synthetic")]
    names = [
        f["name"]
        for (functions,) in read(store, "SELECT functions FROM job_events WHERE job = 'explore'")
        for f in functions
        if f["name"].startswith("operator:")
    ]
    assert names[:3] == [
        "operator:1:num_characters(per=2.0)",
        "operator:2:shorter_is_better(penalty=0.125)",
        "operator:3:copies()",
    ]


def test_a_row_on_which_an_operator_raises_keeps_its_error_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    failing = [here("fails_on_ones")]
    store = lake(tmp_path / "lake", trainer=FOUR, explorer={"operators": failing})
    dropped = (
        "SELECT experience_id FROM experiences WHERE drop_reason LIKE "
        "'fails_on_ones: ValueError: ones are not for me%' ORDER BY 1"
    )
    with_ones = "SELECT experience_id FROM experiences WHERE response_text LIKE '%1%' ORDER BY 1"
    assert read(store, dropped) == read(store, with_ones) != []
    assert read(store, "SELECT experience_id FROM operator_errors ORDER BY 1") == read(
        store, with_ones
    )


@pytest.mark.parametrize(
    ("error", "told", "changes"),
    [
        (ConfigError, "`explorer.operators`: `keep` sees all rows",
         {"explorer": {"operators": [{"keep": {"where": "reward > avg(reward) OVER ()"}}]}}),
        (ConfigError, "`explorer.operators`: `pairs` is a reshape.*put it into a pipeline",
         {"explorer": {"operators": ["pairs"]}}),
        (ConfigError, "writes `first`, String, for which `experiences` has no place",
         {"explorer": {"operators": [here("first_character")]}}),
        (ConfigError, "`trainer.operators`: `copies` is a augment",
         {"trainer": {"operators": [here("copies")]}}),
        (ConfigError, "`keep` drops single rows before `shorter_is_better` sets `reward`",
         {"trainer": {"operators": [CHAIN[1], here("shorter_is_better")]}}),
        (OperatorError, "`keep` drops single rows before `drop_flat_groups`",
         {"trainer": {"operators": CHAIN[::-1]}}),
        (OperatorError, "unknown operator `kep`; did you mean `keep`",
         {"trainer": {"operators": ["kep"]}}),
        (OperatorError, "`keep` has no parameter `were`; did you mean `where`",
         {"explorer": {"operators": [{"keep": {"were": "true"}}]}}),
        (OperatorError, "operator `keep`.*rewrad",
         {"explorer": {"operators": [{"keep": {"where": "rewrad > 0"}}]}}),
    ],
)  # fmt: skip
def test_a_chain_that_cannot_stand_there_is_refused_before_any_work(
    store: Store, error: type[Exception], told: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(error, match=told):
        run(store, config(**changes))
    assert store.count("job_events") == 0


def test_groups_are_refused_where_single_rows_are_drawn(store: Store) -> None:
    store.append("experiences", written(8))
    told = "`drop_flat_groups` sees groups, and this algorithm draws single rows"
    with pytest.raises(ConfigError, match=told):
        run(store, offline(trainer={"operators": ["drop_flat_groups"]}))


def test_an_offline_trainer_trains_on_what_its_chain_keeps(store: Store) -> None:
    store.append("experiences", written(8, response=(2, 4)))
    where = {"keep": {"where": "num_tokens > 4"}}
    run(store, offline(trainer={"operators": [where], "batch_size": 4}))
    weights = "SELECT num_tokens, weight FROM draws JOIN experiences USING (experience_id)"
    assert {(n > 4, w) for n, w in read(store, weights)} <= {(True, 1.0), (False, 0.0)}
    assert read(store, "SELECT count(*) FROM drops") != [(0,)]


BOTH = {
    "explorer": {"operators": [here("num_characters"), "drop_flat_groups"]},
    "trainer": {
        "steps": 4,
        "checkpoint_every": 1,
        "operators": [here("shorter_is_better"), *CHAIN],
    },
}
TOLD = {
    "rows": "SELECT experience_id, drop_reason, metrics FROM experiences ORDER BY 1",
    "draws": "SELECT step, position, experience_id, weight, advantage, digest FROM draws_current "
    "ORDER BY step, position",
    "losses": "SELECT step, value FROM metrics_current WHERE name = 'train/loss' ORDER BY step",
}


def told(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    return {name: read(store, query) for name, query in TOLD.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A run of both chains, from its start to its end."""
    return lake(tmp_path_factory.mktemp("whole") / "lake", **BOTH)


def test_a_resumed_run_with_chains_is_the_uninterrupted_one(tmp_path: Path, whole: Store) -> None:
    store = rlake.connect(tmp_path / "lake")

    def stop_at_two(job: str, step: int, values: object) -> None:
        if (job, step) == ("train", 2):
            raise JobError("stopped by the test")

    with pytest.raises(JobError, match="stopped by the test"):
        run(store, config(**BOTH), listener=stop_at_two)
    run(store, config(**BOTH), resume=True)
    assert told(store) == told(whole)
    with pytest.raises(ConfigError, match=r"started with another `trainer\.operators`"):
        run(store, config(**{**BOTH, "trainer": {"steps": 5}}), resume=True)


@pytest.mark.slow  # about 3 s
def test_explorer_and_trainer_apart_make_the_same_run(tmp_path: Path, whole: Store) -> None:
    settings = config(**BOTH)
    other = threading.Thread(target=lambda: explore(rlake.connect(tmp_path / "lake"), settings))
    other.start()
    train(rlake.connect(tmp_path / "lake"), settings)
    other.join()
    assert told(rlake.connect(tmp_path / "lake")) == told(whole)


def test_a_step_with_a_chain_is_proven_and_a_row_trained_on_against_it_is_named(
    whole: Store,
) -> None:
    steps = [step for (step,) in read(whole, "SELECT DISTINCT step FROM draws ORDER BY 1")]
    assert [rebuild(whole, "demo", step).is_same for step in steps] == [True] * 4
    wrong = "SELECT step, min(experience_id) FROM draws WHERE weight = 0 GROUP BY 1 ORDER BY 1"
    step, name = read(whole, wrong)[0]
    copy = whole.branch("copy")
    copy.dataset("draws").update({"weight": "1.0"}, f"experience_id = '{name}'")
    again = rebuild(rlake.connect(f"{whole.root}@copy"), "demo", step)
    assert not again.is_same
    assert f"`{name}` was trained on, though" in again.detail

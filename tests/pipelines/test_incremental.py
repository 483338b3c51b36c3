"""A run reads only what it has not seen, and its result is that of one run over everything."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import RIGHT_AND_WRONG, experiences, task
from support.operators import copied, length

import rlake
from rlake.operators import Rows, drop_flat_groups, group_zscore, keep, operator
from rlake.operators import pairs as paired
from rlake.pipelines import File, Pipeline, Report, Sql, Table
from rlake.store import Experience, Store

EXPERIENCES = Table("experiences")
DERIVED, PREFERENCES = Table("experience_values"), Table("preferences")


@operator("derive", reads=("response_text",), writes=("words",))
def words(*, least: int = 0) -> Rows:
    def count(row: dict[str, Any]) -> dict[str, Any]:
        return {"words": max(least, len((row["response_text"] or "").split()))}

    return Rows(count, {"words": pl.Int64})


@operator("derive", writes=("place",))
def place_among_all() -> pl.Expr:
    return pl.col("reward").rank("ordinal").cast(pl.Int64).alias("place")


OF_TASKS = "task_id NOT IN (SELECT task_id FROM tasks WHERE split = 'none')"
BY_ROW = [keep(where="reward IS NULL OR reward < 1"), length(), words()]


def pipeline(*operators: Any, source: Any = EXPERIENCES, sink: Any = DERIVED) -> Pipeline:
    return Pipeline(name="p", source=source, operators=operators, sink=sink)


def told(report: Report) -> tuple[int, int]:
    return report.rows_in, report.rows_seen_before


def made(store: Store, table: str = "experience_values") -> pl.DataFrame:
    """All rows that a pipeline made, by their ids, without what says when and by which run."""
    rows = store.scan(table).collect()
    left = rows.drop("created_at", "digest", "lineage_id", strict=False)
    return left.sort([c for c, kind in left.schema.items() if not kind.is_nested()])


def counting(store: Store) -> pl.DataFrame:
    """The values that count: of each row and name, the newest."""
    query = "SELECT experience_id, name, value, text FROM experience_values_current ORDER BY ALL"
    return store.sql(query).pl()


def read(store: Store, query: str) -> list[tuple[Any, ...]]:
    return store.sql(query).fetchall()


@pytest.fixture(scope="module")
def fresh(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Store]:
    """Makes more stores without rows."""

    def make() -> Store:
        folder = tmp_path_factory.mktemp("fresh") / "store"
        shutil.copytree(empty_store, folder)
        return rlake.connect(folder)

    return make


def test_a_second_run_reads_the_rows_that_came_and_makes_what_one_run_makes(
    store: Store, fresh: Callable[[], Store]
) -> None:
    rows, chain = experiences(20, reward=RIGHT_AND_WRONG), pipeline(*BY_ROW)
    store.append("experiences", rows[:15])
    assert told(chain.run(store)) == (15, 0)
    store.append("experiences", rows[15:])
    report = chain.run(store)
    assert told(report) == (5, 15)
    assert "15 seen before" in str(report)
    lines = read(store, "SELECT rows_in, len(pipeline_digest) FROM lineage ORDER BY created_at")
    assert lines == [(15, 20), (5, 20)]
    whole = fresh()
    whole.append("experiences", rows)
    pipeline(*BY_ROW).run(whole)
    assert made(store).equals(made(whole))
    assert read(store, "SELECT count(*), count(DISTINCT experience_id) FROM drops") == [(10, 10)]


def test_with_nothing_new_nothing_is_done_but_with_full_everything(store: Store) -> None:
    store.append("experiences", experiences(8, reward=0.0))
    chain = pipeline(*BY_ROW)
    chain.run(store)
    before = store.versions()
    assert told(chain.run(store)) == (0, 8)
    after = store.versions()
    assert {name for name in before if before[name] != after[name]} == {"lineage"}
    again = chain.run(store, full=True)
    assert told(again) == (8, 0)
    assert (again.rows_out, again.already) == (0, 16)


def test_compaction_makes_no_row_new(store: Store) -> None:
    rows, chain = experiences(12, reward=0.0), pipeline(*BY_ROW)
    for start in range(0, 12, 4):
        store.append("experiences", rows[start : start + 4])
    chain.run(store)
    store.dataset("experiences").optimize.compact_files()
    assert told(chain.run(store)) == (0, 12)
    store.append("experiences", experiences(1, reward=0.0, experience_id="new"))
    store.dataset("experiences").optimize.compact_files()
    assert told(chain.run(store)) == (1, 12)


def test_a_chain_that_sees_groups_reads_the_groups_of_new_rows(store: Store) -> None:
    rows, chain = experiences(12, reward=RIGHT_AND_WRONG), pipeline(group_zscore())
    store.append("experiences", [*rows[:4], *rows[8:], *rows[4:7]])
    assert told(chain.run(store)) == (11, 0)
    store.append("experiences", rows[7:8])
    assert told(chain.run(store)) == (4, 8)
    centered = read(
        store,
        "SELECT value > 0 FROM experience_values_current WHERE starts_with(experience_id, 'g001') "
        "ORDER BY experience_id",
    )
    assert centered == [(True,), (False,), (False,), (True,)]


@pytest.mark.parametrize(
    ("chain", "why"),
    [
        (pipeline(place_among_all()), "`place_among_all` sees all rows"),
        (pipeline(length(), source=Sql("SELECT * FROM experiences")), "a query is read whole"),
        (pipeline(length(), source=Table("experiences", where=OF_TASKS)), "`where` asks tasks"),
    ],
    ids=("all", "sql", "where"),
)
def test_what_depends_on_all_rows_is_done_again_unless_nothing_changed(
    store: Store, chain: Pipeline, why: str
) -> None:
    store.append("tasks", [task(0), task(1)])
    store.append("experiences", experiences(4, reward=0.0))
    assert told(chain.run(store)) == (4, 0)
    assert chain.run(store).rows_in == 0
    store.append("experiences", experiences(1, reward=1.0, experience_id="new"))
    assert f"everything, as {why}" in chain.explain(store)
    assert told(chain.run(store)) == (5, 0)


def test_a_file_is_written_whole_when_rows_came_and_when_it_is_gone(
    store: Store, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    chain = pipeline(length(), sink=File(str(file)))
    store.append("experiences", experiences(4, reward=0.0))
    chain.run(store)
    assert chain.run(store).rows_in == 0
    file.unlink()
    assert chain.run(store).rows_in == 4
    store.append("experiences", experiences(1, experience_id="new"))
    assert chain.run(store).rows_in == 5
    assert pl.read_ndjson(file).height == 5


def test_rows_that_are_returned_are_all_returned_each_time(store: Store) -> None:
    store.append("experiences", experiences(4, reward=0.0))
    look = pipeline(length(), sink=None)
    assert [look.run(store).rows_in for _ in range(2)] == [4, 4]


def test_a_row_is_read_again_when_its_side_column_got_a_value(store: Store) -> None:
    store.append("experiences", experiences(4, reward=0.0))
    strict = {"scorer": "strict", "scorer_version": "1"}
    ids = [f"g000/0{i}" for i in range(4)]
    store.append("scores", [{"experience_id": i, "value": 0.5, **strict} for i in ids[:3]])
    source = Table("experiences", with_columns=["score:strict"], where="strict IS NOT NULL")
    doubled = pipeline({"priority": {"expression": "2 * strict"}}, source=source)
    assert told(doubled.run(store)) == (3, 0)
    store.append("scores", [{"experience_id": ids[3], "value": 0.25, **strict}])
    lax = {**strict, "scorer": "lax"}
    store.append("scores", [{"experience_id": ids[0], "value": 0.125, **lax}])
    assert told(doubled.run(store)) == (1, 3)
    assert told(doubled.run(store)) == (0, 4)
    values = read(store, "SELECT value FROM experience_values ORDER BY experience_id")
    assert values == [(1.0,), (1.0,), (1.0,), (0.5,)]


def test_a_value_that_a_row_lost_to_a_new_one_of_its_group_is_taken_back(
    store: Store, fresh: Callable[[], Store]
) -> None:
    rows = experiences(4, reward=(0.5, 0.0, 0.0, 1.0))
    better = pipeline(group_zscore(), keep(where="advantage > 0"))
    store.append("experiences", rows[:3])
    better.run(store)
    assert counting(store)["experience_id"].to_list() == ["g000/00"]
    store.append("experiences", rows[3:])
    better.run(store)
    whole = fresh()
    whole.append("experiences", rows)
    better.run(whole)
    assert counting(store).equals(counting(whole))
    assert counting(store)["experience_id"].to_list() == ["g000/00", "g000/03"]
    store.append(
        "experiences", experiences(1, reward=9.0, rollout_index=4, experience_id="g000/04")
    )
    better.run(store)
    assert counting(store)["experience_id"].to_list() == ["g000/04"]
    beside = store.scan("experiences", with_columns=["derived:advantage"]).collect()
    assert beside["advantage"].null_count() == 4


def test_what_another_pipeline_said_of_a_row_is_not_taken_back(store: Store) -> None:
    first, second = (
        replace(pipeline(length(), keep(where=f"rollout_index = {n}")), name=f"p{n}")
        for n in (0, 1)
    )
    store.append("experiences", experiences(4, reward=0.0))
    first.run(store)
    second.run(store)
    first.run(store, full=True)
    assert counting(store)["experience_id"].to_list() == ["g000/00", "g000/01"]


def test_a_changed_chain_takes_back_the_values_of_rows_that_it_does_not_keep(store: Store) -> None:
    store.append("experiences", experiences(4, reward=0.0))
    pipeline(length(), keep(where="rollout_index < 3")).run(store)
    pipeline(length(), keep(where="rollout_index > 1")).run(store)
    assert counting(store)["experience_id"].to_list() == ["g000/02", "g000/03"]
    pipeline(words(), keep(where="rollout_index = 0")).run(store)
    names = store.sql("SELECT DISTINCT name FROM experience_values_current ORDER BY 1").fetchall()
    assert len(names) == 2, "of other names nothing is taken back, unless the sink is replaced"
    replaced = pipeline(
        words(), keep(where="rollout_index = 0"), sink=Table("experience_values", mode="replace")
    )
    replaced.run(store)
    assert counting(store)["experience_id"].to_list() == ["g000/00"]


def test_a_row_that_leaves_the_source_by_a_side_column_loses_its_values(store: Store) -> None:
    source = Table("experiences", where="q > 0", with_columns=["q=score:q"])
    chosen = pipeline(length(), source=source)
    store.append("experiences", experiences(3, reward=0.0))
    for version, values in (("1", (1.0, 0.0, 1.0)), ("2", (0.0, 0.0, 1.0))):
        judge(store, version, values)
        chosen.run(store)
    assert counting(store)["experience_id"].to_list() == ["g000/02"]
    assert told(chosen.run(store)) == (0, 1)


def judge(store: Store, version: str, values: Sequence[float]) -> None:
    rows = [
        {"experience_id": f"g000/{i:02d}", "scorer": "q", "scorer_version": version, "value": value}
        for i, value in enumerate(values)
    ]
    store.append("scores", rows)


def test_another_parameter_source_or_name_is_another_pipeline(store: Store) -> None:
    store.append("experiences", experiences(4, reward=0.0))
    pipeline(words()).run(store)
    assert pipeline(words(least=1)).run(store).rows_in == 4
    where = Table("experiences", where="rollout_index > 0")
    assert pipeline(words(), source=where).run(store).rows_in == 3
    assert Pipeline("q", EXPERIENCES, [words()], DERIVED).run(store).rows_in == 4
    assert pipeline(words()).run(store).rows_in == 0


def test_a_run_over_the_past_reads_everything_and_is_nothing_to_go_on_from(store: Store) -> None:
    rows, chain = experiences(8, reward=0.0), pipeline(*BY_ROW)
    store.append("experiences", rows[:4])
    chain.run(store)
    store.snapshot("then")
    store.append("experiences", rows[4:])
    assert told(chain.run(store)) == (4, 4)
    assert told(chain.run(store, at="then")) == (4, 0)
    assert told(chain.run(store)) == (0, 8)


def test_a_branch_goes_on_from_the_runs_before_it_left(store: Store) -> None:
    rows, chain = experiences(8, reward=0.0), pipeline(*BY_ROW)
    store.append("experiences", rows[:4])
    chain.run(store)
    trial = store.branch("trial")
    trial.append("experiences", rows[4:])
    assert told(chain.run(trial)) == (4, 4)
    assert told(chain.run(store)) == (0, 4)


def test_rows_that_a_pipeline_adds_to_its_source_are_not_its_input(store: Store) -> None:
    rows = experiences(8, reward=0.0)
    grow = pipeline(copied(), sink=EXPERIENCES)
    store.append("experiences", rows[:4])
    assert grow.run(store).rows_out == 4
    assert told(grow.run(store))[0] == 0
    store.append("experiences", rows[4:])
    assert grow.run(store).rows_out == 4
    assert store.count("experiences") == 16
    length_too = pipeline(length())
    assert length_too.run(store).rows_in == 16


def test_after_a_kill_before_lineage_the_same_rows_are_read_and_stored_once(store: Store) -> None:
    rows = experiences(8, reward=0.0)
    grow = pipeline(copied(), sink=EXPERIENCES)
    store.append("experiences", rows)
    grow.run(store)
    store.dataset("lineage").delete("true")  # what a kill before the last commit leaves
    store = rlake.connect(store.uri)
    report = grow.run(store)
    assert (report.rows_in, report.rows_out, store.count("experiences")) == (8, 0, 16)


arrivals = st.lists(st.integers(0, 3), min_size=16, max_size=16)
CHAINS: dict[str, Sequence[Any]] = {
    "rows": BY_ROW,
    "groups": [group_zscore(), keep(where="advantage > 0 OR rollout_index = 0"), length()],
    "all": [place_among_all(), words()],
}


@pytest.mark.parametrize(
    "name", ["groups", *(pytest.param(n, marks=pytest.mark.slow) for n in ("rows", "all"))]
)  # about 2 s each
@settings(max_examples=3)
@given(when=arrivals)
def test_however_rows_arrive_the_values_are_those_of_one_run(
    fresh: Callable[[], Store], name: str, when: list[int]
) -> None:
    rows = experiences(16, reward=(1.0, 0.0, 0.5, None, 0.25))
    chain = pipeline(*CHAINS[name])
    piecemeal, whole = fresh(), fresh()
    for part in range(4):
        some = [row for row, at in zip(rows, when, strict=True) if at == part]
        if some:
            piecemeal.append("experiences", some)
        chain.run(piecemeal)
    whole.append("experiences", [rows[i] for i in sorted(range(16), key=lambda i: (when[i], i))])
    chain.run(whole)
    values = made if name == "rows" else counting  # what was said of a part of a group stays too
    assert values(piecemeal).equals(values(whole))


def _by_groups(rows: list[Experience], when: list[int]) -> list[list[Experience]]:
    return [[r for i, r in enumerate(rows) if when[i // 4] == part] for part in range(4)]


@pytest.mark.slow  # about 2 s
@settings(max_examples=3)
@given(when=st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_however_groups_arrive_the_pairs_are_those_of_one_run(
    fresh: Callable[[], Store], when: list[int]
) -> None:
    rows = experiences(16, reward=(1.0, 0.0, 0.5, None, 0.25))
    chain = pipeline(drop_flat_groups(), paired(), sink=PREFERENCES)
    piecemeal, whole = fresh(), fresh()
    for part in _by_groups(rows, when):
        if part:
            piecemeal.append("experiences", part)
        chain.run(piecemeal)
    whole.append("experiences", rows)
    chain.run(whole)
    assert made(piecemeal, "preferences").equals(made(whole, "preferences"))


def test_a_group_filter_before_an_augment_reads_whole_groups_only_once(store: Store) -> None:
    rows = experiences(8, reward=RIGHT_AND_WRONG)
    grow = pipeline(drop_flat_groups(), copied(), sink=EXPERIENCES)
    store.append("experiences", rows[:4])
    assert grow.run(store).rows_out == 4
    store.append("experiences", rows[4:])
    report = grow.run(store)
    assert (report.rows_in, report.rows_out) == (4, 4)
    assert told(grow.run(store))[0] == 0


@pytest.mark.slow  # about 10 s
def test_five_thousand_rows_more_are_five_thousand_rows_treated(
    store: Store, fresh: Callable[[], Store]
) -> None:
    ids = pl.int_range(105_000, eager=True)
    rows = pl.DataFrame({"experience_id": ids.cast(pl.String).str.zfill(6)}).with_columns(
        task_id=pl.lit("t"),
        group_id=(ids // 4).cast(pl.String),
        rollout_index=ids % 4,
        reward=(ids * 7919 % 101) / 100,
        source=pl.lit("imported"),
        response_text=pl.format("answer {} of many", ids % 977),
    )
    chain = pipeline(keep(where="reward > 0.1"), length(), words())
    store.append("experiences", rows[:100_000])
    assert told(chain.run(store)) == (100_000, 0)
    store.append("experiences", rows[100_000:])
    report = chain.run(store)
    assert told(report) == (5_000, 100_000)
    last = "SELECT rows_in FROM lineage ORDER BY created_at DESC LIMIT 1"
    assert read(store, last) == [(5_000,)]
    whole = fresh()
    whole.append("experiences", rows)
    chain.run(whole)
    assert made(store).equals(made(whole))


def test_two_runs_at_once_store_each_value_once(store: Store) -> None:
    @operator("derive", reads=("reward",), writes=("length",), scope="row")
    def overtaken() -> Any:
        def late(rows: pl.LazyFrame) -> pl.LazyFrame:
            if store.count("experiences") and not store.count("experience_values"):
                row = {"experience_id": "g000/00", "name": "length", "value": 7.0}
                version = overtaken().fingerprint[:12]
                store.append(
                    "experience_values", [row | {"version": version, "lineage_id": "the other"}]
                )
            return rows.with_columns(length=pl.lit(7.0))

        return late

    store.append("experiences", experiences(2, reward=0.0))
    report = pipeline(overtaken()).run(store)
    assert (report.rows_out, report.already) == (1, 1)
    assert read(
        store, "SELECT lineage_id = 'the other' FROM experience_values ORDER BY experience_id"
    ) == [(True,), (False,)]


def test_a_verdict_that_its_grown_group_changed_is_a_new_row_that_counts(store: Store) -> None:
    @operator("derive", writes=("reward", "scorer", "scorer_version"), scope="group")
    def ranked() -> Any:
        place = pl.col("reward").rank().over("group_id")
        said = {"scorer": pl.lit("place"), "scorer_version": pl.lit("1.2")}
        return lambda rows: rows.with_columns(reward=place, **said)

    rows = experiences(3, reward=(0.5, 0.0, 0.25))
    places, newest = pipeline(ranked(), sink=Table("scores")), "SELECT value FROM scores_current"
    store.append("experiences", rows[:2])
    places.run(store)
    store.append("experiences", rows[2:])
    assert places.run(store).already == 1
    assert read(store, f"{newest} ORDER BY experience_id") == [(3.0,), (1.0,), (2.0,)]
    assert read(store, "SELECT count(*) FROM scores WHERE scorer_version = '1.2'") == [(3,)]
    assert places.run(store, full=True).already == 3

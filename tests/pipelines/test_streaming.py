"""Rows go through a chain in parts: the same rows come out, in their order, whatever the parts."""

import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from bench.figure import rows
from support.builders import experiences

from rlake.operators import (
    Operator,
    copy_best,
    drop_flat_groups,
    group_zscore,
    keep,
    operator,
    pairs,
    priority,
)
from rlake.pipelines import File, Local, Pipeline, Progress, Sql, Table
from rlake.store import Store
from rlake.store.errors import OperatorError

GROUPS, SIZE = 12, 4


@pytest.fixture
def shuffled(store: Store) -> Store:
    """Store groups whose rows lie between each other, in several commits."""
    made = experiences(GROUPS * SIZE, reward=(1.0, 0.0, None, 0.5, 0.25, 1.0, 1.0))
    random.Random(0).shuffle(made)
    for start in range(0, len(made), 20):
        store.append("experiences", made[start : start + 50])
    return store


@operator("derive", writes=("rank",), reads=("reward",), scope="all")
def rank() -> Any:
    return lambda frame: frame.with_columns(rank=pl.col("reward").rank("ordinal"))


@operator("filter", scope="all", reads=("experience_id",))
def every_third() -> Any:
    return lambda frame: frame.filter(pl.int_range(pl.len()) % 3 > 0)


@operator("augment", scope="group", reads=("experience_id", "group_id"), reads_all=True)
def twice() -> Any:
    def copies(frame: pl.LazyFrame) -> pl.LazyFrame:
        own = [pl.lit(None, pl.String).alias(n) for n in ("experience_id", "group_id")]
        kept = frame.filter(pl.col("rollout_index") % 2 == 0)
        return kept.with_columns(parent_id=pl.col("experience_id")).with_columns(own)

    return copies


CHAINS: dict[str, Sequence[Operator]] = {
    "none": [],
    "rows": [priority(expression="rollout_index"), keep(where="reward > 0")],
    "groups": [group_zscore(), drop_flat_groups(), keep(where="advantage > 0")],
    "all_first": [rank(), keep(where="rank < 20")],
    "all_between": [group_zscore(), rank(), keep(where="rank > 9"), every_third(), priority(
        expression="abs(advantage) + rank")],
    "augment": [group_zscore(), twice(), keep(where="rollout_index < 3")],
    "augment_all": [copy_best(), rank(), every_third()],
    "reshape": [drop_flat_groups(), pairs(strategy="best_against_rest")],
}  # fmt: skip


def whole(store: Store, operators: Sequence[Operator]) -> pl.DataFrame:
    """Apply the operators one after another to all rows at once, in the order of the table."""
    rows = pl.DataFrame(pl.from_arrow(store.dataset("experiences").to_table()))
    for op in operators:
        rows = op.apply(rows).rows
    return rows


def same(found: pl.DataFrame | None, expected: pl.DataFrame, chain: str) -> None:
    assert found is not None
    if chain in ("augment", "augment_all", "reshape"):  # new rows come in the order of their own
        key = "preference_id" if chain == "reshape" else "experience_id"
        old = found if chain == "reshape" else found.filter(pl.col("parent_id").is_null())
        assert found.columns == expected.columns
        if chain == "augment":
            assert old.equals(expected.filter(pl.col("parent_id").is_null()))
        found, expected = found.sort(key), expected.sort(key)
    assert found.equals(expected)
    assert found.schema == expected.schema


@pytest.mark.parametrize("chain", CHAINS)
def test_parts_of_any_size_give_what_all_rows_give_at_once(shuffled: Store, chain: str) -> None:
    operators = CHAINS[chain]
    expected = whole(shuffled, operators)
    outs = []
    for how in (Local(), Local(part_bytes=1, threads=3), Local(part_bytes=1500, threads=1)):
        pipeline = Pipeline(name="x", source=Table("experiences"), operators=operators)
        report = pipeline.run(shuffled, executor=how)
        if chain != "augment_all":  # of rows with other rows before them, another third goes
            same(report.rows, expected, chain)
        outs.append(report)
    assert all(o.rows.equals(outs[0].rows) for o in outs)
    assert all(o.dropped == outs[0].dropped or chain == "reshape" for o in outs)
    counted = [[(s.operator, s.rows_in, s.rows_out) for s in o.steps] for o in outs]
    assert counted[0] == counted[1] == counted[2]


@pytest.mark.parametrize("chain", ["rows", "groups", "all_between"])
def test_a_query_a_file_and_a_frame_give_the_same_as_the_table(
    shuffled: Store, tmp_path: Path, chain: str
) -> None:
    rows = pl.DataFrame(pl.from_arrow(shuffled.dataset("experiences").to_table()))
    named = ["experience_id", "task_id", "group_id", "rollout_index", "reward"]
    rows = rows.select(named)
    rows.write_parquet(tmp_path / "rows.parquet")
    expected = rows
    for op in CHAINS[chain]:
        expected = op.apply(expected).rows
    query = Sql(f"SELECT {', '.join(named)} FROM experiences")
    for source in (query, File(str(tmp_path / "rows.parquet")), rows, rows.lazy()):
        pipeline = Pipeline(name="x", source=source, operators=CHAINS[chain])
        found = pipeline.run(shuffled, executor=Local(part_bytes=500)).rows
        assert found is not None
        assert found.equals(expected), source


def test_a_where_and_side_columns_are_read_part_by_part(shuffled: Store) -> None:
    scorer = {"scorer": "s", "scorer_version": "1"}
    verdicts = [{"experience_id": f"g{g:03d}/00", "value": g, **scorer} for g in range(5)]
    shuffled.append("scores", verdicts)
    source = Table(
        "experiences",
        where="task_id IN (SELECT task_id FROM experiences WHERE rollout_index = 0) "
        "AND rollout_index < 2",
        with_columns=["score:s", "reward=score:s"],
    )
    found = Pipeline(name="x", source=source).run(shuffled, executor=Local(part_bytes=1)).rows
    expected = (
        shuffled.scan("experiences", with_columns=["score:s", "reward=score:s"])
        .filter(pl.col("rollout_index") < 2)
        .collect()
    )
    assert found is not None
    assert found.equals(expected)
    assert found["reward"].count() == 5


def test_an_operator_that_sees_all_rows_gets_only_what_it_reads(shuffled: Store) -> None:
    seen: list[list[str]] = []

    @operator("derive", writes=("place",), reads=("reward",), scope="all")
    def placed() -> Any:
        def place(frame: pl.LazyFrame) -> pl.LazyFrame:
            seen.append(frame.collect_schema().names())
            return frame.with_columns(place=pl.int_range(pl.len()))

        return place

    pipeline = Pipeline(name="x", source=Table("experiences"), operators=[placed()])
    report = pipeline.run(shuffled, executor=Local(part_bytes=1))
    assert seen[-1] == ["experience_id", "task_id", "group_id", "reward"]
    assert report.rows is not None
    assert report.rows["place"].to_list() == list(range(GROUPS * SIZE))


def test_rows_between_stages_lie_in_files_that_go_also_after_an_error(
    shuffled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("rlake.pipelines.running.spill.MEMORY_BYTES", 1)
    monkeypatch.setattr("rlake.pipelines.running.spill.CHUNK_BYTES", 2000)
    on_disk: list[int] = []

    def look(progress: Progress) -> None:
        if progress.stage == progress.stages:
            on_disk.append(len(list(tmp_path.rglob("*.arrow"))))

    operators = CHAINS["all_between"]
    pipeline = Pipeline(name="x", source=Table("experiences"), operators=operators)
    report = pipeline.run(shuffled, executor=Local(part_bytes=1000), listener=look)
    same(report.rows, whole(shuffled, operators), "all_between")
    assert on_disk
    assert min(on_disk) > 3
    assert list(tmp_path.glob("rlake*")) == []

    wrong = [*operators, priority(expression="-1")]
    with pytest.raises(OperatorError, match="not negative"):
        Pipeline(name="x", source=Table("experiences"), operators=wrong).run(shuffled)
    assert list(tmp_path.glob("rlake*")) == []


def test_a_listener_is_told_of_each_part(shuffled: Store) -> None:
    told: list[Progress] = []
    operators = [group_zscore(), keep(where="reward > 0")]
    pipeline = Pipeline(name="x", source=Table("experiences"), operators=operators)
    report = pipeline.run(shuffled, executor=Local(part_bytes=1500), listener=told.append)
    assert len(told) > 3
    treated = [p.treated for p in told]
    assert treated == sorted(treated)
    assert (told[-1].rows, told[-1].treated) == (48, 48)
    assert told[-1].steps == report.steps
    assert told[-1].dropped == report.dropped
    assert told[-1].rows_per_second > 0


def test_lineage_says_what_each_operator_cost(shuffled: Store) -> None:
    operators = [group_zscore(), keep(where="reward > 0"), keep(where="reward < 1")]
    Pipeline(name="x", source=Table("experiences"), operators=operators).run(shuffled)
    [line] = shuffled.scan("lineage").collect().to_dicts()
    costs = line["costs"]
    assert [c["operator"] for c in costs] == ["group_zscore", "keep", "keep 2"]
    ran = line["operators"]
    assert [c["rows"] for c in costs] == [o["rows_in"] for o in ran]
    assert ran[2]["rows_in"] == ran[1]["rows_out"] < ran[1]["rows_in"] == 48
    assert all(c["seconds"] > 0 and c["cached"] == 0 for c in costs)


def test_a_file_that_is_half_written_is_never_seen(shuffled: Store, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    small = Local(part_bytes=1)
    operators: list[Any] = [group_zscore()]
    told = Pipeline(
        name="x", source=Table("experiences"), operators=operators, sink=File(str(path))
    )
    told.run(shuffled, executor=small)
    expected = whole(shuffled, operators)
    assert pl.read_parquet(path).equals(expected)

    operators.append(priority(expression="CASE WHEN group_id = 'g011' THEN -1 ELSE 1 END"))
    with pytest.raises(OperatorError, match="not negative"):
        told.run(shuffled, executor=small)
    assert pl.read_parquet(path).equals(expected)
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["rows.parquet"]


KILLED = """
import os, sys
import rlake
from rlake.pipelines import Local, Pipeline
store = rlake.connect(sys.argv[1])
append, left = store.append, [int(sys.argv[2])]
def dying(name, rows):
    done = append(name, rows)
    left[0] -= 1
    if not left[0]:
        os._exit(9)
    return done
store.append = dying
Pipeline.from_yaml(sys.argv[3]).run(store, executor=Local(part_bytes=1500))
"""
SINKS = {
    "experience_values": (
        "[group_zscore, {keep: {where: reward > 0}}, {priority: {expression: reward}}]"
    ),
    "preferences": "[drop_flat_groups, {pairs: {strategy: best_against_rest}}]",
    "experiences": "[copy_best]",
}


@pytest.mark.parametrize(
    ("sink", "commits"),
    [
        ("experience_values", 3),
        pytest.param("preferences", 2, marks=pytest.mark.slow),
        ("experiences", 1),
    ],
)  # about 3 s each
def test_a_run_that_was_killed_between_parts_stores_nothing_twice(
    shuffled: Store, sink: str, commits: int
) -> None:
    text = f"name: x\nsource: {{table: experiences}}\noperators: {SINKS[sink]}\n"
    text += f"sink: {{table: {sink}}}\n"
    twin = shuffled.branch("twin")
    pipeline = Pipeline.from_yaml(text)
    pipeline.run(twin, executor=Local(part_bytes=1500))
    command = [sys.executable, "-c", KILLED, shuffled.uri, str(commits), text]
    died = subprocess.run(command, check=False, cwd=Path(shuffled.uri).parent)
    assert died.returncode == 9, died
    pipeline.run(shuffled)
    ids = {"experience_values": "experience_id, name, value", "preferences": "preference_id"}
    query = f"SELECT {ids.get(sink, 'experience_id, reward')} FROM {sink} ORDER BY ALL"
    assert shuffled.sql(query).fetchall() == twin.sql(query).fetchall()


PEAK = """
import sys
import rlake
from rlake.pipelines import File, Local, Pipeline, Table
source = Table("experiences", where=f"batch <= {sys.argv[3]}")
Pipeline(name="x", source=source, sink=File(sys.argv[2]), operators=[
    "group_zscore", {"keep": {"where": "rollout_index < 7"}}
]).run(rlake.connect(sys.argv[1]), executor=Local(part_bytes=4 << 20))
with open("/proc/self/status") as status:  # getrusage would tell of the process that started this
    print(next(line for line in status if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.slow  # 15 s: 160 MB are made, and read and written twice
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks are told by Linux")
def test_four_times_the_rows_take_hardly_more_memory(store: Store, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for start in range(0, 48_000, 4000):
        store.append("experiences", rows(rng, 4000, first=start, versions=1, of=48_000))
    path = tmp_path / "out.parquet"

    def peak(steps: int) -> int:
        command = [sys.executable, "-c", PEAK, store.uri, str(path), str(steps)]
        told = subprocess.run(command, check=True, capture_output=True, text=True)
        found = pl.scan_parquet(path).select(pl.len()).collect().item()
        assert found == min(steps * 256, 48_000) * 7 // 8
        return int(told.stdout) >> 10

    few, many = peak(47), peak(188)
    assert many - few < 60, f"{few} and {many} MiB, for 40 and 160 MB of rows"

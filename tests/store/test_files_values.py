"""Values of one's own: columns of a file about stored rows, beside what pipelines derive."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.builders import experiences, task
from support.files import write

from rlake.store import Store
from rlake.store.errors import ConfigError, InputError, QueryError, RlakeError, SchemaError
from rlake.store.files import Imported, import_values, open_input
from rlake.store.undo import undo

IDS = [task(n).task_id for n in range(3)]


@pytest.fixture
def filled(store: Store) -> Store:
    store.append("tasks", [task(n) for n in range(3)])
    store.append("experiences", experiences(4, reward=1.0))
    return store


def bring(store: Store, path: Path, **options: Any) -> Imported:
    with open_input(path) as file:
        return import_values(store, file, **options)


def csv(path: Path, header: str, *lines: str) -> Path:
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def current(store: Store, table: str = "task_values") -> list[tuple[Any, ...]]:
    key = "task_id" if table == "task_values" else "experience_id"
    query = f"SELECT name, value, text FROM {table}_current ORDER BY name, {key}"
    return store.sql(query).fetchall()


def test_a_column_of_a_csv_is_a_value_of_each_task_and_a_second_import_adds_none(
    filled: Store, tmp_path: Path
) -> None:
    path = csv(tmp_path / "a.csv", "task_id,level", *(f"{i},{n}" for n, i in enumerate(IDS)))
    assert bring(filled, path, name="difficulty").rows == 3
    assert sorted(v for _, v, _ in current(filled)) == [0.0, 1.0, 2.0]
    again = bring(filled, path, name="difficulty")
    assert (again.rows, again.already, again.lineage_id) == (0, 3, None)


def test_corrected_values_count_those_before_come_back_when_they_are_undone(
    filled: Store, tmp_path: Path
) -> None:
    path = tmp_path / "a.csv"
    for value in (1, 2, 1):
        done = bring(filled, csv(path, "task_id,difficulty", f"{IDS[0]},{value}"))
        assert current(filled) == [("difficulty", float(value), None)]
    assert done.lineage_id is not None
    undo(filled, done.lineage_id)
    assert current(filled) == [("difficulty", 2.0, None)]
    fewer = csv(path, "task_id,difficulty", f"{IDS[1]},5")
    assert len(bring(filled, fewer, replace="a.csv").replaced) == 2
    assert current(filled) == [("difficulty", 5.0, None)]


def test_wide_and_long_files_of_every_kind_give_the_same_values(
    filled: Store, tmp_path: Path
) -> None:
    rows = [{"experience_id": f"g000/0{n}", "good": n > 1, "topic": f"t{n}"} for n in range(4)]
    wide = pl.DataFrame(rows)
    wide.write_parquet(tmp_path / "wide.parquet")
    assert bring(filled, tmp_path / "wide.parquet").rows == 8
    long = [
        {"experience_id": row["experience_id"], "name": name, "value": float(bool(row["good"]))}
        for row in rows
        for name in ("good",)
    ]
    path = tmp_path / "long.jsonl"
    write(path, *long)
    assert bring(filled, path).already == 4
    frame = filled.scan("experiences", with_columns=["derived:good", "t=derived:topic.text"])
    found = frame.select("good", "t").collect().rows()
    assert found == [(0.0, "t0"), (0.0, "t1"), (1.0, "t2"), (1.0, "t3")]


@pytest.mark.parametrize(
    ("header", "line", "options", "error", "told"),
    [
        ("task_id,level", "nobody,1", {}, SchemaError, "1 of 1 ids of `a.csv` are not stored"),
        ("id,level", "x,1", {}, QueryError, "by `experience_id` or `task_id`; got `id`, `level`"),
        ("task_id,a,b", f"{IDS[0]},1,2", {"name": "c"}, ConfigError, "has 2 columns of values"),
        ("task_id,level", f"{IDS[0]},", {}, InputError, "has no values for `task_id`"),
        ("task_id,a", f"{IDS[0]},1\n{IDS[0]},2", {}, SchemaError, "has two values `a` of"),
        ("task_id,a", f"{IDS[0]},1", {"replace": "b.csv"}, RlakeError, "called `b.csv`"),
    ],
)
def test_a_file_that_is_wrong_is_refused_whole(
    filled: Store,
    tmp_path: Path,
    header: str,
    line: str,
    options: dict[str, str],
    error: type[RlakeError],
    told: str,
) -> None:
    before = filled.versions()
    with pytest.raises(error, match=told):
        bring(filled, csv(tmp_path / "a.csv", header, line), **options)
    assert filled.versions() == before

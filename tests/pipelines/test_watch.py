"""A watched pipeline runs when its source gets rows, whoever writes them, and at no other time."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.builders import experiences
from support.operators import copied, length
from support.processes import start

import rlake
from rlake.operators import group_zscore, keep
from rlake.pipelines import File, Pipeline, Report, Sql, Table, watch
from rlake.store import Store
from rlake.store.errors import ConfigError

EXPERIENCES, DERIVED = Table("experiences"), Table("experience_values")


def pipeline(*operators: Any, source: Any = EXPERIENCES, sink: Any = DERIVED) -> Pipeline:
    return Pipeline(name="p", source=source, operators=operators or (length(),), sink=sink)


def rows_in(reports: Iterator[Report]) -> list[int]:
    return [report.rows_in for report in reports]


WRITER = """
import sys
import rlake
from support.builders import experiences
store = rlake.connect(sys.argv[1])
for part in range(4):
    rows = experiences(4, reward=0.0)
    for row in rows:
        object.__setattr__(row, "experience_id", f"w{part}/{row.experience_id}")
        object.__setattr__(row, "group_id", f"w{part}/{row.group_id}")
    store.append("experiences", rows)
"""


def test_rows_of_another_process_are_treated_as_they_come(store: Store) -> None:
    store.append("experiences", experiences(4, reward=0.0))
    writer = start(WRITER, store.uri)
    stop, total = threading.Event(), 0
    for report in watch(pipeline(), store, stop=stop, until_idle=60):
        total += report.rows_in
        if total == 20:
            stop.set()
    writer.communicate(timeout=100)
    assert writer.returncode == 0
    assert total == 20
    assert store.count("experience_values") == 20


def test_it_ends_when_nothing_came_for_so_long_and_its_own_writes_are_nothing(store: Store) -> None:
    store.append("experiences", experiences(4, reward=0.0))
    grow = pipeline(copied(), sink=EXPERIENCES)
    assert rows_in(watch(grow, store, until_idle=0.3)) == [4]
    assert store.count("experiences") == 8
    assert rows_in(watch(grow, store, until_idle=0.1)) == []
    assert store.count("lineage") == 1


def test_a_query_that_reads_what_the_pipeline_writes_comes_to_rest(store: Store) -> None:
    store.append("experiences", experiences(4, reward=0.0))
    query = (
        "SELECT e.* FROM experiences e ANTI JOIN experience_values USING (experience_id) "
        "LEFT JOIN drops d USING (experience_id) WHERE d.reason IS NULL"
    )
    chain = pipeline(keep(where="rollout_index > 0"), length(), source=Sql(query))
    assert rows_in(watch(chain, store, until_idle=0.3)) == [4, 0]
    assert store.count("experience_values") == 3


def test_it_is_stopped_while_it_waits_and_goes_on_where_it_was(store: Store) -> None:
    store.append("experiences", experiences(4, reward=0.0))
    stop, told = threading.Event(), []

    def work() -> None:
        told.extend(rows_in(watch(pipeline(group_zscore()), rlake.connect(store.uri), stop=stop)))

    thread = threading.Thread(target=work)
    thread.start()
    store.wait_for(
        lambda: store.count("lineage") or None,
        tables=("lineage",),
        seconds=60,
        describe=lambda: "the first run",
    )
    stop.set()
    thread.join(timeout=100)
    assert told == [4]
    store.append("experiences", experiences(1, reward=1.0, experience_id="late"))
    assert rows_in(watch(pipeline(group_zscore()), store, until_idle=0)) == [5]


@pytest.mark.parametrize(
    ("chain", "told"),
    [
        (pipeline(source=File("rows.jsonl")), "reads file rows.jsonl, and only tables"),
        (pipeline(sink=None), "has no sink"),
        (pipeline(source=Sql("SELECT experience_id FROM drops")), "reads only what runs"),
    ],
    ids=("file", "no sink", "drops"),
)
def test_what_cannot_be_watched_is_refused_at_once(
    store: Store, tmp_path: Path, chain: Pipeline, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        next(watch(chain, store, until_idle=0))

"""Where a pipeline runs does not change what comes out: threads here, or Ray Data's tasks."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.builders import experiences

from rlake.operators import (
    copy_best,
    drop_flat_groups,
    group_zscore,
    keep,
    operator,
    pairs,
    priority,
    score,
)
from rlake.pipelines import Local, Pipeline, Ray, Report, Sql, Table
from rlake.store import Store
from rlake.store.errors import OperatorError

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:ray", "ignore::ResourceWarning", "ignore:lance is not fork-safe"
)
SCORED = Sql("SELECT e.*, t.answer FROM experiences e LEFT JOIN tasks t USING (task_id) ORDER BY 1")
CHAINS: dict[str, tuple[Any, ...]] = {
    "rows": (
        Table("experiences"),
        [keep(where="reward > 0"), priority(expression="rollout_index")],
    ),
    "groups": (
        Table("experiences", where="rollout_index < 9"),
        [group_zscore(), drop_flat_groups(), keep(where="advantage > 0")],
    ),
    "all": (Table("experiences"), [group_zscore(), keep(where="row_number() OVER () > 9")]),
    "augment": (
        Table("experiences"),
        [group_zscore(), copy_best(), keep(where="rollout_index < 3")],
    ),
    "query": (SCORED, [score(), keep(where="reward IS NULL OR reward < 1")]),
    "reshape": (Table("experiences"), [drop_flat_groups(), pairs()]),
}
SINKS = {
    "rows": "experience_values",
    "groups": "experience_values",
    "augment": "experiences",
    "reshape": "preferences",
}


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def executor(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Give each executor with small parts; Ray (15 s in all) starts once."""
    if request.param == "local":
        yield Local(threads=3, part_bytes=1500)
        return
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield Ray(tasks=2, part_bytes=4000)
    ray.shutdown()


@pytest.fixture
def filled(store: Store) -> Store:
    made = experiences(48, reward=(1.0, 0.0, None, 0.5, 0.25, 1.0, 1.0))
    store.append("experiences", made[::2])
    store.append("experiences", made[1::2])
    return store


def outcome(report: Report) -> tuple[Any, ...]:
    counts = [(s.operator, s.rows_in, s.rows_out, s.failed) for s in report.steps]
    return report.rows_in, report.rows_out, report.dropped, counts


@pytest.mark.parametrize("chain", CHAINS)
def test_every_executor_gives_the_same_rows(filled: Store, executor: Any, chain: str) -> None:
    source, operators = CHAINS[chain]
    pipeline = Pipeline(name="x", source=source, operators=operators)
    one = pipeline.run(filled, executor=Local(threads=1))
    other = pipeline.run(filled, executor=executor)
    assert one.rows is not None
    assert other.rows is not None
    assert other.rows.equals(one.rows)
    assert other.rows.schema == one.rows.schema
    assert outcome(other) == outcome(one)


@pytest.mark.parametrize("chain", SINKS)
def test_every_executor_stores_the_same(filled: Store, executor: Any, chain: str) -> None:
    source, operators = CHAINS[chain]
    sink = Table(SINKS[chain])
    pipeline = Pipeline(name="x", source=source, operators=operators, sink=sink)
    twin = filled.branch("twin")
    told = [outcome(pipeline.run(twin)), outcome(pipeline.run(filled, executor=executor))]
    assert told[0] == told[1]
    leave = "['created_at', 'lineage_id', 'digest']"  # these tell one run from another
    columns = f"COLUMNS(lambda name: NOT list_contains({leave}, name))"
    query = f"SELECT {columns} FROM {sink.table} ORDER BY ALL"
    assert filled.sql(query).fetchall() == twin.sql(query).fetchall()
    drops = "SELECT operator, experience_id, reason FROM drops ORDER BY ALL"
    assert filled.sql(drops).fetchall() == twin.sql(drops).fetchall()


def test_what_an_operator_raises_reaches_who_asked(filled: Store, executor: Any) -> None:
    wrong = priority(expression="CASE WHEN group_id = 'g011' THEN -1 ELSE 1 END")
    pipeline = Pipeline(name="x", source=Table("experiences"), operators=[wrong])
    with pytest.raises(OperatorError, match=r"operator `priority`.*not negative, got -1"):
        pipeline.run(filled, executor=executor)


def test_a_function_of_ones_own_can_be_sent(filled: Store, executor: Any) -> None:
    factor = 3.0

    def body(frame: Any) -> Any:
        return frame.with_columns(tripled=frame_column("reward") * factor)

    def frame_column(name: str) -> Any:
        import polars as pl

        return pl.col(name)

    # as of a notebook: its function has no module that another process could import
    body.__module__ = frame_column.__module__ = "__main__"

    def tripled() -> Any:
        return body

    tripled.__module__ = "__main__"
    made = operator("derive", writes=("tripled",), scope="row", reads=("reward",))(tripled)
    pipeline = Pipeline(name="x", source=Table("experiences"), operators=[made()])
    rows = pipeline.run(filled, executor=executor).rows
    assert rows is not None
    assert rows["tripled"].sum() == 3 * rows["reward"].sum()

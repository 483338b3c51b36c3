"""Every algorithm trains on stored rows alone: of other runs, replayed, of a query or of a file."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import SPEC, offline, table, written

from rlake.loop.algorithms import names, resolve
from rlake.loop.run import run
from rlake.store import Store
from rlake.store.errors import ConfigError

ONLINE = {
    (str(made.advantage()), made.needs, type(made).prepare): name
    for name in names()
    if (made := resolve(name)).unit == "group"
}
"""One algorithm of each kind of credit, of columns that it needs, and of preparation."""
SAMPLERS: list[Any] = ["fifo", "uniform", {"prioritized": {"priority": "0.1 + abs(reward)"}}]


def stored(store: Store, *, groups: int = 3) -> None:
    """Tries of a run that is over, in groups of four, one greedy and one an expert's."""
    rows = []
    for i, row in enumerate(written(4 * groups, response=[3, 5, 4, 6] * groups)):
        given = {"metrics": {"is_greedy": 1.0}, "drop_reason": "greedy"} if i % 4 == 3 else {}
        source = "expert" if i % 4 == 2 else "explorer"
        teacher = [x - 0.2 for x in row.logprobs or ()]
        rows.append(replace(row, teacher_logprobs=teacher, source=source, run_id="past", **given))
    store.append("experiences", rows)


@pytest.mark.parametrize("name", ONLINE.values())
def test_any_online_algorithm_replays_what_is_stored_with_any_sampler(
    store: Store, name: str
) -> None:
    stored(store)
    sampler = SAMPLERS[list(ONLINE.values()).index(name) % len(SAMPLERS)]
    trainer = {"batch_size": 2, "steps": 2, "max_uses": 2, "sampler": sampler}
    run(store, offline(name="replay", algorithm=name, trainer=trainer))
    losses = store.sql(
        "SELECT step, value FROM metrics WHERE name = 'train/loss' ORDER BY step"
    ).fetchall()
    assert [step for step, _ in losses] == [1, 2]
    assert all(value is not None and math.isfinite(value) for _, value in losses)
    drawn = table(store, "draws_current")
    assert drawn["step"].to_list().count(1) >= 2
    weights = table(store, "policies").sort("policy_version")["digest"].to_list()
    assert weights[0] != weights[-1]


def test_rows_of_a_file_are_stored_once_and_trained_on(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    pairs = [("1+1=", "2"), ("2+2=", "4"), ("3+4=", "7")]
    path.write_text("\n".join(json.dumps({"q": q, "a": a}) for q, a in pairs))
    sql = "SELECT q AS prompt_text, a AS response_text, 'expert' AS source FROM input"
    settings = {"model": {"from_scratch": SPEC}, "data": {"file": {"path": str(path), "sql": sql}}}
    run(store, offline(trainer={"batch_size": 3}, **settings))
    run(store, offline(name="again", trainer={"batch_size": 3}, **settings))
    assert table(store, "experiences").height == 3
    drawn = table(store, "draws_current")
    assert sorted(drawn["run_id"]) == ["again"] * 3 + ["demo"] * 3


def test_a_file_that_is_not_there_is_said_before_any_work(store: Store) -> None:
    with pytest.raises(ConfigError, match=r"`data.file`: the file `nowhere.jsonl` does not"):
        run(store, offline(data={"file": "nowhere.jsonl"}))
    assert table(store, "job_events").height == 0

"""Rows of each pipeline can be told apart, taken back as a whole, and replaced by what it gives."""

from dataclasses import replace
from typing import Any

import pytest
from support.builders import RIGHT_AND_WRONG, experiences, task

from rlake.operators import copy_best, keep, pairs, score
from rlake.pipelines import Pipeline, Sql, Table
from rlake.store import Store
from rlake.store.errors import ConfigError
from rlake.store.replay import Sampler
from rlake.store.undo import undo

EXPERIENCES = Table("experiences")
REPLACED = Table("preferences", mode="replace")
ALL = pairs(strategy="all", distinct_by=None)
BEST = pairs(strategy="max_min", distinct_by=None)


@pytest.fixture
def filled(store: Store) -> Store:
    store.append("tasks", [task(0)])
    store.append("experiences", experiences(4, reward=RIGHT_AND_WRONG))
    return store


def pairing(name: str, *operators: Any, sink: Table = REPLACED) -> Pipeline:
    return Pipeline(name, EXPERIENCES, operators, sink)


def current(store: Store, table: str = "preferences") -> int:
    return store.sql(f"SELECT count(*) FROM {table}_current").fetchall()[0][0]


def made_by(store: Store, name: str) -> int:
    query = f"SELECT count(DISTINCT row_id) FROM makers WHERE name = '{name}' AND is_current"
    return store.sql(query).fetchall()[0][0]


def test_a_pair_that_two_pipelines_make_is_one_pair_and_is_found_by_both(filled: Store) -> None:
    append = Table("preferences")
    first = pairing("all", ALL, sink=append).run(filled)
    second = pairing("best", BEST, sink=append).run(filled)
    assert (first.rows_out, second.rows_out, second.already) == (4, 0, 1)
    assert (made_by(filled, "all"), made_by(filled, "best")) == (4, 1)
    chosen = "SELECT row_id AS preference_id FROM makers WHERE name = 'best' AND is_current"
    of_second = Sampler(filled, table="preferences", query=chosen)
    assert of_second.supply(1, 0).fresh == 1
    assert Sampler(filled, table="preferences").supply(1, 0).fresh == 4, "none comes twice"
    assert undo(filled, first.lineage_id).rows == {"preferences": 3}
    assert (current(filled), made_by(filled, "all")) == (1, 0)


def test_a_replaced_sink_has_exactly_what_the_current_definition_gives(filled: Store) -> None:
    pairing("mine", ALL).run(filled)
    changed = pairing("mine", BEST).run(filled)
    assert (filled.count("preferences"), current(filled)) == (4, 1)
    assert pairing("mine", BEST).run(filled).rows_in == 0, "nothing came: nothing is replaced"
    assert current(filled) == 1
    undo(filled, changed.lineage_id)
    assert current(filled) == 4, "what was replaced is back"


def test_what_appends_beside_keeps_what_an_older_definition_gave(filled: Store) -> None:
    for operator in (ALL, BEST):
        pairing("mine", operator, sink=Table("preferences")).run(filled)
    assert current(filled) == 4


def test_a_pipeline_replaces_only_what_runs_of_its_name_gave(filled: Store) -> None:
    pairing("other", ALL).run(filled)
    pairing("mine", BEST).run(filled)
    pairing("mine", keep(where="rollout_index > 1"), pairs(distinct_by=None)).run(filled)
    assert (current(filled), made_by(filled, "other"), made_by(filled, "mine")) == (4, 4, 1)


def test_verdicts_of_a_replaced_sink_are_those_of_the_rows_that_it_has_now(filled: Store) -> None:
    judged = Pipeline(
        "judge",
        Sql("SELECT e.*, t.answer FROM experiences e JOIN tasks t USING (task_id)"),
        [score(reward="exact_match")],
        Table("scores", mode="replace"),
    )
    judged.run(filled)
    fewer = replace(judged, operators=[keep(where="rollout_index < 2"), *judged.operators])
    fewer.run(filled)
    assert (filled.count("scores"), current(filled, "scores")) == (4, 2)


def test_a_run_that_was_undone_is_done_again(filled: Store) -> None:
    mine = pairing("mine", ALL, sink=Table("preferences"))
    undo(filled, mine.run(filled).lineage_id)
    assert current(filled) == 0
    again = mine.run(filled)
    assert (again.rows_in, again.already, current(filled)) == (4, 4, 4)


def test_rows_that_were_taken_back_are_no_input(filled: Store) -> None:
    more = [
        e.row() | {"lineage_id": "an import"} for e in experiences(8, reward=RIGHT_AND_WRONG)[4:]
    ]
    filled.append("experiences", more)
    mine = pairing("mine", ALL)
    assert mine.run(filled).rows_in == 8
    undo(filled, "an import")
    run = mine.run(filled)
    assert (run.rows_in, current(filled)) == (4, 4)


def test_what_a_replacing_augment_added_before_is_not_its_source(filled: Store) -> None:
    sink = Table("experiences", mode="replace")
    for least in (0.5, 0.25):
        chain = [copy_best(min_reward=least)]
        assert Pipeline("best", EXPERIENCES, chain, sink).run(filled).rows_in == 4
    made = "FROM experiences_current WHERE parent_id IS NOT NULL"
    assert filled.sql(f"SELECT count(*) {made}").fetchall() == [(1,)]
    assert filled.count("experiences") == 6


def test_the_plan_says_that_the_sink_is_replaced(filled: Store) -> None:
    told = pairing("mine", ALL).explain(filled)
    assert "sink        table preferences, replaced" in told
    pairing("mine", ALL).run(filled)
    assert "nothing: no row came" in pairing("mine", ALL).explain(filled)


def test_a_mode_is_of_a_sink_and_one_of_two() -> None:
    text = "name: p\nsource: {table: experiences}\noperators: [drop_flat_groups]\n"
    with pytest.raises(ConfigError, match=r"sink\.mode"):
        Pipeline.from_yaml(text + "sink: {table: preferences, mode: overwrite}")
    with pytest.raises(ConfigError, match="a source has no `mode`"):
        Pipeline("p", REPLACED, [keep(where="margin > 0")]).plan()

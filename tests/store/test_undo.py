"""Undoing: what one import or run added is taken back as a whole, and nothing is lost by it."""

from pathlib import Path
from typing import Any

import pytest
from support.builders import experiences, task
from support.files import write

from rlake.store import Store
from rlake.store.errors import NotFoundError, QueryError
from rlake.store.files import Imported, export, import_rows, open_input
from rlake.store.replay import Mixture, Sampler, Source
from rlake.store.undo import redo, undo

MAPPING = "SELECT q AS prompt_text, a AS response_text, r AS reward, g AS group_id FROM input"
CORRECTED = MAPPING.replace("r AS", "(r + 1) / 4 AS")


def tries(n: int, *, first: int = 0) -> list[dict[str, Any]]:
    """Lines of a file: n tries, two at each question."""
    return [
        {"q": f"{i // 2}+1=", "a": str(i), "r": float(i % 2), "g": f"g{i // 2}"}
        for i in range(first, first + n)
    ]


def bring(store: Store, path: Path, sql: str = MAPPING, **options: Any) -> Imported:
    with open_input(path) as file:
        return import_rows(store, "experiences", file, sql=sql, **options)


def current(store: Store, table: str = "experiences") -> int:
    return store.sql(f"SELECT count(*) FROM {table}_current").fetchall()[0][0]


def drawn(sampler: Sampler, n: int, step: int = 1) -> list[str]:
    draw = sampler.draw(n, step=step, policy_version=0)
    return [] if draw is None else sampler.read(draw, ["experience_id"])["experience_id"].to_list()


def test_a_corrected_mapping_imported_again_takes_the_place_of_the_first(
    store: Store, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", *tries(200))
    first = bring(store, path)
    second = bring(store, path, CORRECTED, replace="a.jsonl")
    assert second.replaced == (first.lineage_id,)
    assert (store.count("experiences"), current(store)) == (400, 200)
    assert current(store, "tasks") == 100, "tasks that both gave stay"
    means = store.sql("SELECT max(reward_mean) FROM groups").fetchall()
    assert means == [(0.375,)], "a group has the corrected rows only"
    assert bring(store, path, CORRECTED, replace="a.jsonl").rows == 0
    assert current(store) == 200, "a third import, of the same rows, keeps them"


def test_undoing_puts_back_what_was_replaced_and_redoing_takes_it_again(
    store: Store, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", *tries(6))
    first = bring(store, path).lineage_id
    second = bring(store, path, CORRECTED, replace="a.jsonl").lineage_id
    assert first is not None
    assert second is not None
    with pytest.raises(QueryError, match=f"was replaced by `{second}`"):
        undo(store, first)
    done = undo(store, second)
    assert (done.name, done.rows, done.others) == ("a.jsonl", {"experiences": 6}, (first,))
    assert store.sql("SELECT DISTINCT lineage_id FROM experiences_current").fetchall() == [(first,)]
    assert redo(store, second).others == (first,)
    assert store.sql("SELECT DISTINCT lineage_id FROM experiences_current").fetchall() == [
        (second,)
    ]
    assert store.count("experiences") == 12, "facts do not change"


def test_rows_that_another_import_gave_too_stay(store: Store, tmp_path: Path) -> None:
    first = bring(store, write(tmp_path / "a.jsonl", *tries(4)), taskset="sums").lineage_id
    both = bring(store, write(tmp_path / "b.jsonl", *tries(6)), taskset="sums")
    assert first is not None
    assert (both.rows, both.already) == (2, 4)
    done = undo(store, first)
    assert (done.rows, done.shared) == ({}, {"tasks": 2, "experiences": 4})
    assert current(store) == 6
    query = f"SELECT count(*) FROM makers WHERE lineage_id = '{both.lineage_id}' AND table_name = "
    assert store.sql(query + "'experiences'").fetchall() == [(6,)], "all six are addressable"
    assert both.lineage_id is not None
    assert undo(store, both.lineage_id).rows == {"tasks": 3, "experiences": 6}


def test_what_was_taken_back_and_is_imported_again_counts_again(
    store: Store, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", *tries(4))
    first = bring(store, path).lineage_id
    assert bring(store, path).lineage_id is None, "a second import adds nothing"
    assert first is not None
    undo(store, first)
    assert current(store) == 0
    again = bring(store, path)
    assert (again.rows, again.already, current(store)) == (0, 4, 4)
    assert again.lineage_id not in (None, first)


def test_no_new_draw_has_a_row_that_was_taken_back(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *tries(8))
    kept = bring(store, write(tmp_path / "b.jsonl", *tries(2, first=100))).lineage_id
    gone = bring(store, path).lineage_id
    assert gone is not None
    plain, grouped = Sampler(store), Sampler(store, grouped=True)
    mixed = Mixture(store, {"all": Source(share=1.0)})
    for sampler in (plain, grouped):
        sampler.refresh()
    undo(store, gone)
    ids = store.sql(f"SELECT experience_id FROM experiences WHERE lineage_id = '{kept}'").fetchall()
    wanted = {row[0] for row in ids}
    assert (plain.supply(1, 0).fresh, grouped.supply(1, 0).fresh) == (2, 1)
    assert set(drawn(plain, 2)) == set(drawn(grouped, 1)) == wanted
    assert mixed.supply(1, 0).fresh == 2
    redo(store, gone)
    assert plain.supply(1, 0).fresh == 8


def test_a_group_is_drawn_without_its_rows_that_were_taken_back(
    store: Store, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", *tries(4))
    bring(store, path)
    bring(store, path, CORRECTED, replace="a.jsonl")
    sampler = Sampler(store, grouped=True)
    draw = sampler.draw(2, step=1, policy_version=0)
    assert draw is not None
    rows = sampler.read(draw, ["reward"])
    assert sorted(rows["reward"]) == [0.25, 0.25, 0.5, 0.5]


def test_a_step_that_had_rows_taken_back_later_is_drawn_again_as_it_was(
    store: Store, tmp_path: Path
) -> None:
    done = bring(store, write(tmp_path / "a.jsonl", *tries(8)))
    sampler = Sampler(store, grouped=True, seed=3)
    draw = sampler.draw(2, step=1, policy_version=0)
    assert draw is not None
    before = sampler.read(draw, ["experience_id", "reward"])
    assert done.lineage_id is not None
    undo(store, done.lineage_id)
    again = Sampler(store, grouped=True, seed=3)
    ids = before["experience_id"].to_list()
    redrawn = again.redraw(ids, step=1, weights=[1.0] * len(ids))
    assert again.read(redrawn, ["experience_id", "reward"]).equals(before)
    rebuilt = Sampler(store, grouped=True, seed=3, until=draw.drawn_from)
    same = rebuilt.draw(2, step=1, policy_version=0)
    assert same is not None
    assert rebuilt.read(same, ["experience_id", "reward"]).equals(before)
    assert again.draw(1, step=2, policy_version=0) is None, "what is left is no new draw"


def test_exports_and_pairs_leave_out_what_was_taken_back(store: Store, tmp_path: Path) -> None:
    done = bring(store, write(tmp_path / "a.jsonl", *tries(4)))
    store.append("tasks", [task(0)])
    store.append("experiences", experiences(2, reward=(1.0, 0.0), prompt_text="0+0="))
    ids = [r[0] for r in store.sql("SELECT experience_id FROM experiences").fetchall()]
    mine = [i for i in ids if i.startswith("imported/")]
    rows = [
        {"preference_id": f"p{n}", "task_id": "t", "chosen_id": a, "rejected_id": b, "source": "me"}
        for n, (a, b) in enumerate([(mine[0], mine[1]), ("g000/00", "g000/01")])
    ]
    store.append("preferences", rows)
    assert done.lineage_id is not None
    undo(store, done.lineage_id)
    assert export(store, "sft", tmp_path / "sft.jsonl").rows == 2
    assert export(store, "dpo", tmp_path / "dpo.jsonl").rows == 1
    assert Sampler(store, table="preferences").supply(1, 0).fresh == 1


def test_values_of_an_undone_run_give_way_to_the_older_ones(store: Store) -> None:
    store.append("experiences", experiences(1))
    for lineage_id, value in (("first", 1.0), ("second", 2.0)):
        row = {"experience_id": "g000/00", "name": "quality", "version": lineage_id}
        store.append("experience_values", [{**row, "value": value, "lineage_id": lineage_id}])
    follows = Sampler(store, with_columns=["derived:quality"])
    follows.refresh()
    undo(store, "second")
    assert store.sql("SELECT value FROM experience_values_current").fetchall() == [(1.0,)]
    frame = store.scan("experiences", with_columns=["derived:quality"]).select("quality")
    assert frame.collect().rows() == [(1.0,)]


def test_what_cannot_be_undone_is_told_with_the_way_out(store: Store, tmp_path: Path) -> None:
    done = bring(store, write(tmp_path / "a.jsonl", *tries(2)))
    assert done.lineage_id is not None
    with pytest.raises(NotFoundError, match="no import or pipeline run `nothing`"):
        undo(store, "nothing")
    with pytest.raises(QueryError, match="was not taken back"):
        redo(store, done.lineage_id)
    undo(store, done.lineage_id)
    with pytest.raises(QueryError, match="was taken back before"):
        undo(store, done.lineage_id)
    with pytest.raises(NotFoundError, match=r"no import of experiences is called `b\.jsonl`"):
        bring(store, tmp_path / "a.jsonl", CORRECTED, replace="b.jsonl")

"""A table that a store had and lacks is an error that names it; nothing makes it anew."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.builders import experiences, task

from rlake.store import Store, connect, marker
from rlake.store.connect import look
from rlake.store.doctor import diagnose
from rlake.store.errors import NotAStoreError, StoreError
from rlake.store.schema import TABLES


def lose(lake: Store, *names: str) -> list[Path]:
    """Remove tables, as an interrupted copy lacks them; return what is left."""
    assert lake.folder is not None
    for name in names:
        shutil.rmtree(lake.folder / f"{name}.lance")
    return sorted(lake.folder.rglob("*"))


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_is_gone_is_named_and_not_made_anew(store: Store, name: str) -> None:
    left = lose(store, name)
    for create in (True, False, True):
        with pytest.raises(StoreError, match=f"has lost table `{name}`: "):
            connect(store.uri, create=create)
    assert lose(store) == left


def test_a_copy_of_a_part_is_not_completed(store: Store, tmp_path: Path) -> None:
    store.append("tasks", [task(0)])
    (tmp_path / "copy").mkdir()
    for name in ("experience_values", "draws"):  # both without rows, and the locks are not copied
        shutil.copytree(f"{store.uri}/{name}.lance", tmp_path / "copy" / f"{name}.lance")
    with pytest.raises(StoreError, match=r"lost tables `tasks`, `experiences`, .*`retention`"):
        connect(tmp_path / "copy")
    assert len(list((tmp_path / "copy").glob("*.lance"))) == 2


@pytest.mark.parametrize("gone", ["experiences", "tasks"])
def test_the_doctor_says_which_table_is_lost(store: Store, gone: str) -> None:
    store.append("experiences", experiences(4))
    lose(store, gone)
    wrong = [f for f in diagnose(look(store.uri)) if f.level == "error"]
    assert f"cannot open table `{gone}`" in wrong[0].what
    assert "from a copy" in wrong[0].way_out


READS: dict[str, Callable[[Store], object]] = {
    "append": lambda lake: lake.append("tasks", [task(1)]),
    "stream": lambda lake: lake.append_stream("tasks", [[task(1)]]),
    "count": lambda lake: lake.count("tasks"),
    "sql": lambda lake: lake.sql("SELECT 1"),
    "scan": lambda lake: lake.scan("tasks"),
    "snapshot": lambda lake: lake.snapshot("s"),
    "branch": lambda lake: lake.branch("b"),
    "maintain": lambda lake: lake.maintain(),
}


@pytest.mark.parametrize("act", READS)
def test_a_table_that_goes_while_the_store_is_open_is_named(store: Store, act: str) -> None:
    store.append("tasks", [task(0)])
    store.sql("SELECT * FROM tasks").fetchall()
    left = lose(store, "tasks")
    with pytest.raises(StoreError, match="`tasks`"):
        READS[act](store)
    assert not [p for p in set(lose(store)) - {*left} if "tasks.lance" in p.parts]


def test_a_branch_that_lost_a_table_says_so(store: Store) -> None:
    trial = store.branch("trial")
    trial.append("tasks", [task(0)])
    assert store.folder is not None
    shutil.rmtree(store.folder / "tasks.lance" / "tree" / "trial")
    with pytest.raises(StoreError, match=r"has lost `tasks`.*`rlake branch drop trial`"):
        connect(f"{store.uri}@trial")
    connect(store.uri)


def test_what_was_half_made_is_completed_by_who_writes_and_not_by_who_reads(store: Store) -> None:
    marker.put(store)
    left = lose(store, "experiences", "job_events")
    with pytest.raises(StoreError, match="never made whole: its maker was killed"):
        connect(store.uri, create=False)
    assert lose(store) == left
    assert connect(store.uri).append("experiences", experiences(4)).rows == 4
    assert connect(store.uri, create=False).count("experiences") == 4
    assert not marker.is_there(store)


def test_looking_at_nothing_makes_nothing(tmp_path: Path) -> None:
    for act in (look, lambda place: connect(place, create=False)):
        with pytest.raises(NotAStoreError, match="no store at"):
            act(tmp_path / "nosuch")
    assert not [*tmp_path.iterdir()]

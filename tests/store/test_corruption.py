"""A deep look finds every planted fault in a row's values, whatever the column or the table."""

import hashlib
import random
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from support.builders import experiences, task
from support.images import png

from rlake.store import Store, connect
from rlake.store.corruption import examine
from rlake.store.doctor import Finding, diagnose
from rlake.store.errors import SchemaError
from rlake.store.media import put_images
from rlake.store.merge_branch import merge
from rlake.store.row_digests import whole_rows
from rlake.store.schema import NAMED_VALUES, TABLES
from rlake.store.validate import conform


@pytest.fixture
def filled(store: Store) -> Store:
    store.append("tasks", [task(i) for i in range(4)])
    made = experiences(16, reward=1.0, token_ids=[*range(300)], loss_mask=[False] + [True] * 299,
                       rewards={"format": 0.25})  # fmt: skip
    store.append("experiences", made)
    scores = [{"experience_id": e.experience_id, "scorer": "s", "scorer_version": "1",
               "value": 1.0} for e in made]  # fmt: skip
    store.append("scores", scores)
    labels = [{"feedback_id": f"f{i}", "experience_id": made[i].experience_id, "annotator": "ann",
               "score": 0.5} for i in range(8)]  # fmt: skip
    store.append("feedback", labels)
    pairs = [{"preference_id": f"p{i}", "task_id": "t", "chosen_id": made[i].experience_id,
              "rejected_id": made[i + 8].experience_id, "source": "ann"}
             for i in range(8)]  # fmt: skip
    store.append("preferences", pairs)
    return store


def wrong(store: Store) -> list[Finding]:
    return [f for f in examine(connect(store.uri)) if f.level == "error"]


def data_of(store: Store, name: str) -> Path:
    [path] = (Path(store.uri) / f"{name}.lance" / "data").iterdir()
    return path


def rewrite(store: Store, name: str, column: str, values: pa.Array) -> None:
    """Put other values into a column of a table, as nothing of rlake does."""
    dataset = store.dataset(name)
    rows = dataset.to_table()
    place = rows.schema.get_field_index(column)
    rows = rows.set_column(place, rows.schema.field(place), values)
    lance.write_dataset(rows, dataset.uri, mode="overwrite")


def test_a_sound_store_is_read_whole(filled: Store) -> None:
    filled.snapshot("s")
    filled.branch("b").append("tasks", [task(9)])
    filled.maintain(grace=0)
    found = examine(filled)
    assert {f.level for f in found} == {"ok"}
    assert "`experiences`: 16 rows in 1 file read whole" in [f.what for f in found]
    assert "`tasks`: 5 rows in 2 files read whole" in [f.what for f in found]


def other(values: pa.Array) -> pa.Array:
    """Change the first value a little, in whatever type."""
    first: Any = values[0].as_py()
    changed = {
        str: lambda text: chr(ord(text[0]) ^ 1) + text[1:],
        int: lambda number: number + 1,
        float: lambda number: number + 0.5,
        bool: lambda flag: not flag,
        dict: lambda field: {**field, "value": field["value"] + 0.5},
    }
    if isinstance(first, list):
        new: Any = [changed[type(first[0])](first[0]), *first[1:]]
    else:
        new = changed[type(first)](first)
    return pa.array([new, *values.to_pylist()[1:]], values.type)


@pytest.mark.parametrize(
    "column",
    [
        "group_id",
        "task_id",
        "rewards",
        "token_ids",
        "loss_mask",
        "rollout_index",
        "reward",
        "source",
    ],
)
def test_a_changed_value_of_an_undrawn_row_is_found(filled: Store, column: str) -> None:
    values = filled.dataset("experiences").to_table().column(column).combine_chunks()
    rewrite(filled, "experiences", column, other(values))
    [found] = wrong(filled)
    assert "1 row in" in found.what
    assert found.what.endswith("are not what was appended, such as `g000/00`")
    assert "from a copy" in found.way_out


@pytest.mark.parametrize(
    ("name", "column", "first"),
    [
        ("tasks", "messages", "hash of the first task"),
        ("tasks", "split", "hash of the first task"),
        ("preferences", "rejected_id", "p0"),
        ("scores", "value", "g000/00 s 1"),
        ("feedback", "score", "f0"),
        ("feedback", "annotator", "f0"),
    ],
)
def test_a_changed_value_of_any_digested_table_is_found(
    filled: Store, name: str, column: str, first: str
) -> None:
    rows = filled.dataset(name).to_table()
    assert rows.column("digest").null_count == 0, "from the append on"
    rewrite(filled, name, column, other(rows.column(column).combine_chunks()))
    [found] = wrong(filled)
    key = rows.column("task_id")[0] if name == "tasks" else first
    assert found.what.startswith(f"`{name}`: 1 row in")
    assert found.what.endswith(f"are not what was appended, such as `{key}`")


def test_a_value_that_became_null_is_found(filled: Store) -> None:
    rewrite(filled, "experiences", "reward", pa.nulls(16, pa.float64()))
    [found] = wrong(filled)
    assert "16 rows in" in found.what


@pytest.mark.parametrize("name", ["experiences", "scores", "tasks"])
def test_a_zeroed_page_is_found(filled: Store, name: str) -> None:
    path = data_of(filled, name)
    whole = path.read_bytes()
    path.write_bytes(bytes(1024) + whole[1024:])
    found = wrong(filled)
    assert found
    assert all(path.name in f.what for f in found if "more than once" not in f.what)


DIGESTED = [name for name, table in TABLES.items() if table.is_digested]


def test_no_flipped_bit_changes_a_row_unseen(filled: Store) -> None:
    """Bits of padding and of unused statistics may flip: then the rows are what they were."""
    paths = {name: data_of(filled, name) for name in DIGESTED}
    whole = {name: path.read_bytes() for name, path in paths.items()}
    before = {name: filled.dataset(name).to_table() for name in DIGESTED}
    rng, seen = random.Random(3), Counter[str]()
    for _ in range(40):
        for name, path in paths.items():
            content, place = whole[name], rng.randrange(len(whole[name]))
            flipped = bytes([content[place] ^ 1 << rng.randrange(8)])
            path.write_bytes(content[:place] + flipped + content[place + 1 :])
        found = [f.what for f in wrong(filled)]
        for name in DIGESTED:
            if any(f"`{name}`" in what for what in found):
                seen[name] += 1
            else:
                names = [*TABLES[name].names]
                assert connect(filled.uri).dataset(name).to_table(columns=names) == before[name]
    assert min(seen[name] for name in DIGESTED) > 20, seen


def test_the_tables_of_users_have_digests_whoever_writes_them(filled: Store) -> None:
    assert DIGESTED == ["tasks", "experiences", "preferences", "scores", "feedback"]
    branch = filled.branch("b")
    scores = [{"experience_id": "g000/00", "scorer": "later", "scorer_version": "1", "value": 0.5,
               "digest": "of something else"}]  # fmt: skip
    branch.append("scores", scores)
    assert merge(filled, "b")["scores"].rows == 1
    assert merge(filled, "b")["scores"].already == 1
    for name in DIGESTED:
        again = filled.dataset(name).to_table()
        assert filled.append(name, again.drop_columns(["digest"])).duplicates == again.num_rows
    assert {f.level for f in examine(filled)} == {"ok"}


def test_ids_that_came_twice_from_outside_are_named(filled: Store) -> None:
    for name in ("experiences", "tasks"):
        dataset = filled.dataset(name)
        lance.write_dataset(dataset.to_table().slice(0, 2), dataset.uri, mode="append")
    found = [f.what for f in wrong(filled)]
    assert len(found) == 2
    assert all("2 keys are there more than once, such as" in what for what in found)


def test_rows_without_a_digest_are_counted(filled: Store) -> None:
    rewrite(filled, "experiences", "digest", pa.nulls(16, pa.string()))
    assert wrong(filled) == []
    [note] = [f for f in examine(filled) if f.level == "note"]
    assert note.what.startswith("`experiences`: 16 rows came before rows had digests")


def test_images_are_read_whole_and_compared_with_their_ids(store: Store) -> None:
    file = BytesIO()
    Image.effect_noise((600, 600), 90).save(file, "PNG")  # too large for the file of its row
    put_images(store, [png("red"), file.getvalue()])
    assert {f.level for f in examine(store)} == {"ok"}
    folder = Path(store.uri) / "media.lance"
    [large] = folder.rglob("*.blob")
    whole = large.read_bytes()
    changed = bytes([whole[1000] ^ 1])
    large.write_bytes(whole[:1000] + changed + whole[1001:])
    [found] = wrong(store)
    media_id = hashlib.sha256(file.getvalue()).hexdigest()
    assert found.what.endswith(f"are not what was appended, such as `{media_id}`")
    large.unlink()
    [found] = wrong(store)
    assert found.what.startswith("`media`: `data` in")
    assert "cannot be read" in found.what


def test_files_that_only_a_snapshot_shows_are_read(filled: Store) -> None:
    path = data_of(filled, "experiences")
    filled.snapshot("s")
    filled.append("experiences", experiences(20, reward=1.0)[16:])
    filled.maintain(grace=0)
    path.write_bytes(bytes(1024) + path.read_bytes()[1024:])
    assert any(path.name in f.what for f in wrong(filled))


def test_a_column_from_outside_is_named_and_harmless_where_it_may_be_null(filled: Store) -> None:
    dataset = filled.dataset("tasks")
    dataset.add_columns(pa.schema([pa.field("mine", pa.float64())]))
    assert filled.append("tasks", [task(0), task(8)]).rows == 1
    [note] = [f for f in diagnose(filled) if "`mine`" in f.what]
    assert note.level == "note"
    assert "drop_columns(['mine'])" in note.way_out


def test_a_column_from_outside_that_lets_no_row_in_is_named(filled: Store) -> None:
    filled.dataset("tasks").add_columns({"mine": "1.0"})
    with pytest.raises(SchemaError, match=r"`tasks`: column `mine` came from outside, .*remove it"):
        filled.append("tasks", [task(8)])
    [found] = [f for f in diagnose(filled) if f.level == "error"]
    assert "no row can be appended" in found.what
    filled.dataset("tasks").alter_columns({"path": "mine", "nullable": True})  # pyright: ignore[reportArgumentType]
    assert filled.append("tasks", [task(8)]).rows == 1


def test_a_digest_is_of_the_row_alone() -> None:
    made = experiences(12, reward=1.0, token_ids=[1, 2, 3], rewards={"a": 1.0, "b": None})
    rows = conform(TABLES["experiences"], [*made, *experiences(16)[12:]])
    digests = whole_rows(rows)
    assert len(set(digests)) == 16
    assert whole_rows(rows.slice(5, 7)) == digests[5:12]
    assert whole_rows(pa.concat_tables([rows.slice(0, 3), rows.slice(3)])) == digests
    assert whole_rows(rows.take([9, 2])) == [digests[9], digests[2]]
    assert whole_rows(pa.Table.from_pylist(rows.to_pylist(), rows.schema)) == digests
    there = [n for n in rows.column_names if rows.column(n).null_count < 16]
    assert whole_rows(rows.select(there)) == digests, "a column that is NULL counts for nothing"


def test_the_digest_of_a_row_does_not_change_with_versions_of_rlake() -> None:
    row = {"a": [1], "b": [True], "c": [2.5], "d": ["x\u00e9"], "e": [[1, None, 3]],
           "g": [[True, False]], "h": [None]}  # fmt: skip
    rewards = pa.array([[{"name": "n", "value": None}]], NAMED_VALUES)
    [digest] = whole_rows(pa.table({**row, "f": rewards}))
    assert digest == "e8bac97079f17800477724fc58927638"
    longs = pa.table({"a": pa.array([np.iinfo(np.int64).min, 0])})
    assert len({*whole_rows(longs)}) == 2


def test_appending_again_what_has_a_digest_adds_nothing(filled: Store) -> None:
    stored = filled.dataset("experiences").to_table()
    assert stored.column("digest").null_count == 0
    assert filled.append("experiences", stored).duplicates == 16
    bare = stored.set_column(
        stored.schema.get_field_index("digest"), "digest", pa.array(["?"] * 16)
    )
    assert filled.append("experiences", bare).duplicates == 16

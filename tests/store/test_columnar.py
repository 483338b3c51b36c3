"""What is worked out for all rows at once is what each row gives by itself."""

import json
import struct
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rlake.store import Store, connect
from rlake.store.errors import ConflictError, InputError, QueryError
from rlake.store.files import import_file
from rlake.store.files.file_kind import InputSession, open_input, why_bad
from rlake.store.files.text_numbers import Counts, Rollouts
from rlake.store.hash_numbers import HashNumbers
from rlake.store.ids import row_digests

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "text": (pa.string(), TEXT),
    "real": (pa.float64(), st.floats()),
    "single": (pa.float32(), st.floats(width=32)),
    "count": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "flag": (pa.bool_(), st.booleans()),
    "time": (pa.timestamp("us", "UTC"), st.integers(0, 2**50)),
    "tokens": (pa.list_(pa.int32()), st.lists(st.integers(0, 99), max_size=3)),
    "named": (
        pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())])),
        st.lists(st.fixed_dictionaries({"name": TEXT, "value": NUMBER}), max_size=2),
    ),
}
ROWS = st.lists(
    st.fixed_dictionaries({n: st.none() | values for n, (_, values) in COLUMNS.items()}), max_size=6
)


def digest_of(row: dict[str, Any]) -> str:
    """Digest a row by itself, as stored digests were always made."""
    text = json.JSONEncoder(ensure_ascii=False, default=str).encode
    framed = "\x1f".join(sorted(row)).encode()
    for name in sorted(row):
        value = row[name]
        if value is None:
            framed += b"\x00"
            continue
        cell = text(value).encode()
        if name == "text":
            cell = value.encode()
        elif name == "tokens":
            cell = np.array(value, np.int32).tobytes()
        framed += struct.pack("<BQ", 1, len(cell)) + cell
    return blake2b(framed, digest_size=16).hexdigest()


@given(ROWS, st.integers(0, 6))
def test_digests_are_those_of_single_rows(rows: list[dict[str, Any]], cut: int) -> None:
    table = pa.Table.from_pylist(rows, pa.schema([(n, kind) for n, (kind, _) in COLUMNS.items()]))
    parts = pa.concat_tables([table[:cut], table[cut:]])
    assert row_digests(parts) == [digest_of(row) for row in table.to_pylist()]


BATCHES = st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=9), max_size=12)


@given(BATCHES)
def test_numbers_by_hash_are_those_of_a_dict(batches: list[list[str]]) -> None:
    numbers, known = HashNumbers(missing=-1), {}
    for place, batch in enumerate(batches):
        keys = np.array([ord(one) for one in batch], np.uint64)
        assert numbers.find(keys).tolist() == [known.get(one, -1) for one in batch]
        numbers.put(keys, np.full(len(keys), place))
        known |= dict.fromkeys(batch, place)


@given(BATCHES)
def test_texts_are_counted_as_one_by_one(batches: list[list[str]]) -> None:
    counts, seen = Counts(), ""
    for batch in batches:
        made = counts.before(batch).tolist()
        for text, before in zip(batch, made, strict=True):
            assert before == seen.count(text)
            seen += text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=9), max_size=6))
def test_rollouts_are_numbered_as_one_by_one(
    store: Store, batches: list[list[tuple[int, int]]]
) -> None:
    rollouts = Rollouts(store)
    numbers: dict[str, int] = {}
    highest: dict[str, int] = {}
    for batch in batches:
        ids, groups = [f"e{row}" for row, _ in batch], [f"g{group}" for _, group in batch]
        expected = []
        for row, group in zip(ids, groups, strict=True):
            if row not in numbers:
                numbers[row] = highest[group] = highest.get(group, -1) + 1
            expected.append(numbers[row])
        assert rollouts.next(ids, groups).tolist() == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=5), max_size=4))
def test_a_stream_stores_each_row_once_or_names_the_conflict(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[tuple[int, bool]]]
) -> None:
    store = connect(str(tmp_path_factory.mktemp("lake")))
    same = {"taskset": "t", "split": "train", "messages": "[]"}
    rows = [
        [same | {"task_id": f"{i}", "answer": "odd" if odd else "even"} for i, odd in batch]
        for batch in batches
    ]
    given_rows = [row for batch in rows for row in batch]
    answers = {row["task_id"]: row["answer"] for row in reversed(given_rows)}
    if any(row["answer"] != answers[row["task_id"]] for row in given_rows):
        with pytest.raises(ConflictError, match="comes twice among the new rows"):
            store.append_stream("tasks", rows)
        assert not store.count("tasks")
        return
    done = store.append_stream("tasks", rows)
    assert (done.rows, done.duplicates) == (len(answers), len(given_rows) - len(answers))
    assert store.append_stream("tasks", rows).duplicates == len(given_rows)


LINE = st.fixed_dictionaries(
    {"prompt_text": TEXT},
    optional={
        "response_text": st.none() | TEXT,
        "reward": st.none() | NUMBER | st.integers(-(2**70), 2**70) | st.booleans(),
        "num_turns": st.none() | st.integers(-(2**63), 2**63 - 1),
    },
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
    max_examples=30,  # each opens two sessions, 30 ms
    phases=(Phase.explicit, Phase.generate),
)
@given(st.lists(LINE, min_size=1, max_size=5), st.booleans())
def test_lines_read_by_duckdb_are_the_rows_that_are_read_one_by_one(
    tmp_path: Path,
    rows: list[dict[str, Any]],
    is_ascii: bool,  # noqa: FBT001
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=is_ascii) for row in rows))
    found = []
    for kind in ("jsonl", "json"):  # objects that stand one after the other are read in Python
        with open_input(path, format=kind) as file:
            session = InputSession(file, None, spelled=True)
            assert session.num_rows == len(rows)
            found.append(session.select("SELECT * FROM input").to_arrow_table())
    assert found[0].equals(found[1])


@pytest.mark.parametrize("skip", [False, True])
def test_a_key_that_comes_twice_is_named_with_its_row(
    store: Store, tmp_path: Path, *, skip: bool
) -> None:
    lines = ['{"prompt_text": "1"}', '{"prompt_text": "2", "answer": "3", "answer": "4"}']
    (tmp_path / "twice.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"row 2 of `twice.jsonl` has the key `answer` twice"):
        import_file(store, tmp_path / "twice.jsonl", "tasks", skip_invalid=skip)


PIECES = rb"""{"a": } " 1 , [ ] \ud83d \ude00 NaN - 0 \\ . e { {"a":1} true \u00e9 \x00""".split()
PIECES += [b" ", b"\t", b"\x00", b"\xff", "\u00e9".encode()]


@given(st.lists(st.sampled_from(PIECES), max_size=8).map(b"".join) | st.binary(max_size=12))
def test_no_line_passes_that_json_refuses(line: bytes) -> None:
    try:
        value = json.loads(line.decode())
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        value = None
    assert (why_bad(line) is None) == isinstance(value, dict)


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_a_value_that_a_select_cannot_cast_is_refused_wherever_it_stands(
    store: Store, tmp_path: Path, kind: str
) -> None:
    given_rows = [{"prompt_text": "x" if i == 9000 else f"{i}"} for i in range(10_000)]
    path = tmp_path / f"late.{kind}"
    path.write_text("\n".join(map(json.dumps, given_rows)))
    sql = "SELECT (prompt_text::INT)::VARCHAR AS prompt_text FROM input"
    with pytest.raises(QueryError, match="Could not convert string 'x' to INT32"):
        import_file(store, path, "tasks", sql=sql)
    assert not store.count("tasks")

"""Digests tell rows apart by their values, and by nothing else."""

import polars as pl
import pyarrow as pa
import pytest

from rlake.store.ids import combine, content_id, group_id, rollout_id, row_digests

TABLE = pa.table(
    {
        "token_ids": pa.array([[1, 2, 3], [], None, [4]], pa.list_(pa.int32())),
        "logprobs": pa.array([[0.0, -1.0, -2.0], [], None, [-0.5]], pa.list_(pa.float32())),
        "loss_mask": pa.array([[False, True, True], [], None, [True]], pa.list_(pa.bool_())),
        "reward": pa.array([1.0, 0.0, None, 0.5]),
        "response_text": pa.array(["é", "", None, "x"]),
        "rewards": pa.array(
            [[{"name": "a", "value": 1.0}], [], None, [{"name": "a", "value": None}]]
        ),
    }
)


def replaced(name: str, values: list[object]) -> pa.Table:
    place = TABLE.column_names.index(name)
    return TABLE.set_column(place, name, pa.array(values, TABLE.schema.field(name).type))


@pytest.mark.parametrize("name", TABLE.column_names)
def test_another_value_changes_the_digest_of_its_row_only(name: str) -> None:
    values = TABLE.column(name).to_pylist()
    values[0] = values[3]
    before, after = row_digests(TABLE), row_digests(replaced(name, values))
    assert [a != b for a, b in zip(before, after, strict=True)] == [True, False, False, False]


def test_one_flipped_bit_changes_the_digest() -> None:
    values = TABLE.column("token_ids").to_pylist()
    seen = {row_digests(TABLE)[0]}
    for token in range(3):
        for bit in range(31):
            flipped = [*values[0][:token], values[0][token] ^ (1 << bit), *values[0][token + 1 :]]
            seen.add(row_digests(replaced("token_ids", [flipped, *values[1:]]))[0])
    assert len(seen) == 1 + 3 * 31


def test_the_smallest_change_of_a_float_changes_the_digest() -> None:
    values = TABLE.column("logprobs").to_pylist()
    nearest = -1.0000001192092896  # the float32 next to -1
    assert (
        row_digests(TABLE)[0]
        != row_digests(replaced("logprobs", [[0.0, nearest, -2.0], *values[1:]]))[0]
    )


@pytest.mark.parametrize("name", TABLE.column_names)
def test_null_is_not_empty_or_zero(name: str) -> None:
    nothing = {"reward": 0.0, "response_text": ""}.get(name, [])
    nulls, empties = replaced(name, [None] * 4), replaced(name, [nothing] * 4)
    pairs = zip(row_digests(nulls), row_digests(empties), strict=True)
    assert all(null != empty for null, empty in pairs)


def test_values_do_not_slip_into_their_neighbours() -> None:
    def digest(a: list[int] | None, b: list[int] | None) -> str:
        kind = pa.list_(pa.int32())
        return row_digests(pa.table({"a": pa.array([a], kind), "b": pa.array([b], kind)}))[0]

    pairs = [
        ([1], [2, 3]),
        ([1, 2], [3]),
        ([1, 2, 3], []),
        ([], [1, 2, 3]),
        ([1, 2, 3], None),
        (None, [1, 2, 3]),
    ]
    assert len({digest(*pair) for pair in pairs}) == len(pairs)


def test_names_count_and_the_order_of_columns_does_not() -> None:
    assert row_digests(TABLE) == row_digests(TABLE.select(TABLE.column_names[::-1]))
    assert row_digests(TABLE) != row_digests(TABLE.rename_columns({"reward": "advantage"}))


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_chunks_slices_and_large_lists_do_not_count(cut: int) -> None:
    digests = row_digests(TABLE)
    assert row_digests(pa.concat_tables([TABLE[:cut], TABLE[cut:]])) == digests
    assert row_digests(TABLE[cut:]) == digests[cut:]
    assert row_digests(pl.DataFrame(pl.from_arrow(TABLE)).to_arrow()) == digests
    large = pa.large_list(pa.int32())
    assert row_digests(TABLE.set_column(0, "token_ids", TABLE.column(0).cast(large))) == digests


def test_no_rows_have_no_digests() -> None:
    assert row_digests(TABLE[:0]) == []


def test_a_batch_is_its_rows_in_order() -> None:
    digests = row_digests(TABLE)
    assert combine(digests) == combine(list(digests))
    assert len({combine(digests), combine(digests[::-1]), combine(digests[:3])}) == 3


def test_ids_are_the_same_in_every_version() -> None:
    assert content_id("2+2", None, {"b": 1, "a": [1]}) == content_id(
        "2+2", None, {"a": [1], "b": 1}
    )
    assert content_id("2+2", "4") == "a7773601325227163bce"
    assert row_digests(pa.table({"a": pa.array([[1, 2]], pa.list_(pa.int32()))})) == [
        "5db575e783e09911de1b329d0f64f44c"
    ]


def test_ids_sort_in_order_of_production() -> None:
    groups = [group_id("r", batch, place) for batch in (1, 2, 10, 100) for place in (0, 9, 10)]
    assert groups == sorted(groups)
    rollouts = [rollout_id(groups[0], i) for i in range(12)]
    assert rollouts == sorted(rollouts)
    assert rollout_id("g", 2) < rollout_id("g", 2, 1) < rollout_id("g", 3)

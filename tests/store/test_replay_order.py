"""The order in which rows of a run are taken up that come while they are drawn."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.builders import experiences

from rlake.store import Experience, Store
from rlake.store.ids import group_id, rollout_id
from rlake.store.replay import Order, Sampler
from rlake.store.replay.row_index import Index


def group(step: int, place: int, *, size: int = 2) -> list[Experience]:
    """Return the rows of one group of the explorer's."""
    name = group_id("demo", step, place)
    return [
        replace(
            row,
            experience_id=rollout_id(name, i),
            group_id=name,
            run_id="demo",
            batch=step,
            group_index=place,
            rollout_index=i,
            policy_version=0,
        )
        for i, row in enumerate(experiences(size))
    ]


def drawn(sampler: Sampler, store: Store, n: int) -> list[str] | None:
    """Draw n groups; return the groups' ends, or None when there are too few."""
    draw = sampler.draw(n, step=1, policy_version=0)
    if draw is None:
        return None
    ids = sampler.read(draw, ["experience_id", "group_id"])["group_id"]
    return [name.removeprefix("demo/") for name in ids.unique(maintain_order=True)]


def sampler(store: Store, order: Order) -> Sampler:
    return Sampler(store, grouped=True, run_id="demo", order=order)


def test_a_group_waits_for_those_before_it_whatever_comes_first(store: Store) -> None:
    ours = sampler(store, Order(groups_per_batch=3))
    store.append("experiences", group(1, 2))
    store.append("experiences", group(2, 0))
    assert drawn(ours, store, 1) is None
    store.append("experiences", group(1, 0))
    assert drawn(ours, store, 2) is None
    store.append("experiences", group(1, 1))
    assert drawn(ours, store, 4) == ["000001/0000", "000001/0001", "000001/0002", "000002/0000"]


@pytest.mark.parametrize("arrivals", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_the_same_groups_are_drawn_in_the_same_order_however_they_arrive(
    store: Store, arrivals: Sequence[int]
) -> None:
    ours = sampler(store, Order(groups_per_batch=2))
    for number in arrivals:
        store.append("experiences", group(1 + number // 2, number % 2))
        ours.refresh()
    assert drawn(ours, store, 2) == ["000001/0000", "000001/0001"]
    assert drawn(ours, store, 2) == ["000002/0000", "000002/0001"]


def test_groups_that_arrive_out_of_order_do_not_make_the_index_read_all_again(store: Store) -> None:
    for order in (Order(groups_per_batch=4), Order(by_arrival=True)):
        run = Index(store, grouped=True, run_id="demo", order=order)
        for place in (3, 1, 0, 2):
            if order.groups_per_batch:
                store.append("experiences", group(1, place))
            run.refresh()
            assert not run.rebuilt
        assert len(run) == 4


def test_by_arrival_the_first_that_is_stored_is_the_first_that_is_drawn(store: Store) -> None:
    ours = sampler(store, Order(by_arrival=True))
    for step, place in ((2, 1), (1, 0), (2, 0)):
        store.append("experiences", group(step, place))
        ours.refresh()
    expected = ["000002/0001", "000001/0000", "000002/0000"]
    assert drawn(ours, store, 3) == expected
    again = sampler(store, Order(by_arrival=True))
    assert drawn(again, store, 3) == expected  # a function of what is stored


def test_the_order_by_arrival_outlives_maintenance(store: Store) -> None:
    for step, place in ((2, 1), (1, 0), (2, 0)):
        store.append("experiences", group(step, place))
    store.maintain(grace=0.0)
    ours = sampler(store, Order(by_arrival=True))
    assert drawn(ours, store, 3) == ["000002/0001", "000001/0000", "000002/0000"]


def test_by_arrival_rows_of_several_groups_in_turn_are_whole_groups(store: Store) -> None:
    """Each try may end with a row of another group, as reflections on answers are."""
    looks_back = [
        replace(row, experience_id=f"{row.experience_id}.1", group_id=f"{row.group_id}/back")
        for row in group(1, 0)
    ]
    tries = [row for both in zip(group(1, 0), looks_back, strict=True) for row in both]
    ours = sampler(store, Order(by_arrival=True))
    store.append("experiences", tries)
    assert drawn(ours, store, 2) == ["000001/0000", "000001/0000/back"]
    assert drawn(ours, store, 1) is None

"""Divide an update into micro-batches of sequences of similar length, by a token budget."""

from collections.abc import Sequence


def plan_micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    units: Sequence[int] | None = None,
    packed: bool = False,
) -> list[list[int]]:
    """Group the positions of rows of similar length so that each group is within the budget.

    A padded group counts its longest row times its rows; a packed one the sum of its rows. Rows of
    one unit stay together, in their order. A unit longer than the budget is a group of its own.

    >>> plan_micro_batches([2, 9, 3, 8], 18)
    [[1, 3], [2, 0]]
    >>> plan_micro_batches([2, 9, 3, 8], 20, packed=True)
    [[1, 3, 2], [0]]
    >>> plan_micro_batches([2, 9, 3, 8], 18, units=[0, 0, 1, 1])
    [[0, 1], [2, 3]]
    """
    whole = members(range(len(lengths)) if units is None else units)
    groups: list[list[int]] = []
    filled = longest = 0
    # Longest first: the first unit of a group decides its padded width.
    for places in sorted(whole, key=lambda unit: -max(lengths[i] for i in unit)):
        if not groups:
            longest = max(lengths[i] for i in places)
        added = sum(lengths[i] for i in places) if packed else longest * len(places)
        if groups and filled + added <= max_tokens:
            groups[-1].extend(places)
            filled += added
            continue
        groups.append(list(places))
        longest = max(lengths[i] for i in places)
        filled = sum(lengths[i] for i in places) if packed else longest * len(places)
    return groups


def split_mini_batches(
    units: Sequence[int], num_parts: int, order: Sequence[int]
) -> list[list[int]]:
    """Divide the rows of a step into parts with an equal number of units, in the given order.

    >>> split_mini_batches([0, 0, 1, 1, 2, 2], 2, [2, 0, 1])
    [[4, 5, 0, 1], [2, 3]]
    """
    whole = members(units)
    each = -(-len(whole) // num_parts)
    cut = [order[i : i + each] for i in range(0, len(order), each)]
    return [[place for unit in some for place in whole[unit]] for some in cut]


def members(units: Sequence[int]) -> list[list[int]]:
    """Return the positions of the rows of each unit, in the order in which units appear.

    >>> members([7, 7, 3])
    [[0, 1], [2]]
    """
    found: dict[int, list[int]] = {}
    for place, unit in enumerate(units):
        found.setdefault(unit, []).append(place)
    return list(found.values())

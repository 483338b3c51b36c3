"""Cutting an update into micro-batches: sequences of like length together, by token budget."""

from collections.abc import Sequence


def plan_micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    units: Sequence[int] | None = None,
    packed: bool = False,
) -> list[list[int]]:
    """Group places of rows of similar length so that each group keeps within the budget.

    A group counts as it is padded, or, packed, as its rows together. Rows of one unit stay
    together, in their order. A unit longer than the budget is a group of its own.

    >>> plan_micro_batches([2, 9, 3, 8], 18)
    [[1, 3], [2, 0]]
    >>> plan_micro_batches([2, 9, 3, 8], 20, packed=True)
    [[1, 3, 2], [0]]
    >>> plan_micro_batches([2, 9, 3, 8], 18, units=[0, 0, 1, 1])
    [[0, 1], [2, 3]]
    """
    whole: dict[int, list[int]] = {}
    for place, unit in enumerate(range(len(lengths)) if units is None else units):
        whole.setdefault(unit, []).append(place)
    groups: list[list[int]] = []
    filled = longest = 0
    for places in sorted(whole.values(), key=lambda unit: -max(lengths[i] for i in unit)):
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
    """Cut the rows of a step into parts of as many units each, units in the order given.

    >>> split_mini_batches([0, 0, 1, 1, 2, 2], 2, [2, 0, 1])
    [[4, 5, 0, 1], [2, 3]]
    """
    whole: dict[int, list[int]] = {}
    for place, unit in enumerate(units):
        whole.setdefault(unit, []).append(place)
    members = list(whole.values())
    each = -(-len(members) // num_parts)
    cut = [order[i : i + each] for i in range(0, len(order), each)]
    return [[place for unit in some for place in members[unit]] for some in cut]

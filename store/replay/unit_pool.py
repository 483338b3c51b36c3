"""The pool of units that may be drawn: their masses are summed per block, so a draw is cheap.

A draw reads one sum per block, and the units of only the blocks that it hits. Sums are recomputed
only for blocks in which something changed: a count, a priority, freshness, the horizon.
"""

from dataclasses import dataclass

import numpy as np

from .growable_arrays import BLOCK, GrowableArray, repeats

NO_VERSION = int(np.iinfo(np.int32).max)
"""The version of rows that no policy of ours wrote: they are never stale."""

_NEVER = int(np.iinfo(np.int32).max)
_MOST = 16
"""Draws of more than 1/16 of the pool sort it: drawing one by one would hit units again."""
_AT_ONCE = 4096
"""Blocks that are summed together: a million units, some tens of MB of working memory."""


@dataclass(frozen=True)
class Bounds:
    """Which units may be drawn at a step, out of those that are drawable at all."""

    oldest: int | None = None
    """The oldest policy version that is fresh; None: any."""
    limit: int | None = None
    """Places from here on may not be drawn; None: all places may."""


@dataclass
class UnitPool:
    """What a draw knows of each unit of an index."""

    drawable: GrowableArray
    """Whether it has a row that may be drawn."""
    versions: GrowableArray
    """Oldest policy version, NO_VERSION where none of its rows has one."""
    times: GrowableArray
    """How often it was drawn."""
    masses: GrowableArray | None
    """Its chance in a draw, NaN where its priority is not known; None: all weigh the same."""


class Pool:
    """Units in canonical order, with the mass of each that may be drawn: its relative chance."""

    def __init__(self, units: UnitPool, *, max_draws: int | None) -> None:
        """Look at the units of an index, each of which is drawn `max_draws` times at most.

        A unit whose priority is not known weighs as much as the heaviest that may be drawn, or 1
        when none has a mass.
        """
        self._drawable, self._versions = units.drawable, units.versions
        self._times, self._masses = units.times, units.masses
        self._max_draws = max_draws
        self._bounds = Bounds()
        self._size = 0
        self._sums = np.zeros(0, _SUMS)
        self._dirty = np.zeros(0, np.bool_)

    # what is there

    def touch(self, units: np.ndarray) -> None:
        """Mark these units as changed."""
        blocks = units // BLOCK
        # blocks that are not in the sums yet are added as changed by `_grow`
        self._dirty[blocks[blocks < len(self._dirty)]] = True

    def touch_all(self) -> None:
        """Mark all units as changed."""
        self._dirty[:] = True

    def look(self, *, oldest: int | None, horizon: int | None) -> None:
        """Bring all sums up to date for these bounds; `horizon` counts drawable units."""
        self._grow()
        # Also before the bounds are known: their limit is found by these sums.
        self._sum_again()
        bounds = Bounds(oldest, self._limit(horizon))
        if bounds != self._bounds:
            self._dirty |= self._differ(bounds)
            self._bounds = bounds
            self._sum_again()

    @property
    def drawable(self) -> int:
        """Units that may be drawn at all, up to the horizon."""
        return int(self._sums["drawable"].sum())

    @property
    def open(self) -> int:
        """Those of them that were drawn less often than is allowed."""
        return int(self._sums["open"].sum())

    @property
    def fresh(self) -> int:
        """Those of them that are fresh."""
        return int(self._sums["fresh"].sum())

    @property
    def size(self) -> int:
        """Those of them that have a chance: their mass is above 0."""
        return int(self._sums["size"].sum())

    @property
    def room(self) -> int | None:
        """How often units can be drawn until all are used up; None: without end."""
        if self._max_draws is None:
            return None if self.size else 0
        return self._max_draws * self.size - int(self._sums["times"].sum())

    # choosing

    def candidates(self) -> np.ndarray:
        """Return the places of all fresh units, whatever their mass."""
        blocks = np.flatnonzero(self._sums["fresh"])
        return _places(blocks, self._may(blocks))

    def first(self, n: int) -> np.ndarray:
        """Return the places of the first `n`, those drawn least before those drawn more."""
        least = self._sums["least"]
        level = int(least.min(initial=_NEVER))
        blocks, found, taken = np.flatnonzero(least == level), [], 0
        # Some blocks at a time, because the first ones are nearly always enough.
        for part in np.array_split(blocks, range(_FIRST, len(blocks), _FIRST)):
            if taken >= n:
                break
            may = self._may(part) & (self._times.blocks[part] == level)
            found.append(_places(part, may))
            taken += len(found[-1])
        if taken >= n:
            return np.concatenate([*found, _NOWHERE])[:n]
        places = self.candidates()
        return places[np.argsort(self._times.values[places], kind="stable")[:n]]

    def random(self, n: int, rng: np.random.Generator, *, replacement: bool) -> np.ndarray:
        """Return `n` places drawn one after the other, each with the chance of its mass.

        Without replacement a place that was drawn is passed over from then on (successive
        sampling), with it a place that was drawn as often as is allowed. Without a horizon, units
        that could not be drawn as often as is allowed in later draws of this size are all in it.
        """
        due = self._due(n) if not replacement else _NOWHERE
        if len(due) or (not replacement and n * _MOST > self.size):
            return self._race(n, rng, due)
        heavy = self._heavy()
        masses = self._sums["mass"] + heavy * self._sums["unknown"]
        drawn, gone = _NOWHERE, _NOWHERE
        while len(drawn) < n:
            if len(gone):
                blocks = np.unique(gone // BLOCK)
                masses[blocks] = self._inside(blocks, gone, heavy)[:, -1]
            edges = np.cumsum(masses)
            assert edges[-1] > 0, "there are as many as the supply counted"
            # a unit that is hit again is redrawn from the rest, which is successive sampling
            points = rng.random(n - len(drawn)) * edges[-1]
            # rounding may yield the total itself, which lies beyond the last block
            points = np.minimum(points, np.nextafter(edges[-1], 0.0))
            hits = np.searchsorted(edges, points, side="right")
            blocks = np.unique(hits)
            inside = self._inside(blocks, gone, heavy)
            before = np.where(blocks > 0, edges[blocks - 1], 0.0)
            at = np.searchsorted((before[:, None] + inside).ravel(), points, side="right")
            places = blocks[at // BLOCK] * BLOCK + at % BLOCK
            drawn, gone = self._accept(drawn, places, replacement=replacement)
        return drawn

    def _due(self, n: int) -> np.ndarray:
        """Return the places that every later draw must contain for all units to be used up.

        That takes at least `draws` more draws of `n`, none of which has a place twice: a place with
        that many draws left is in each of them. There are never more than `n` such places.
        """
        room = self.room
        if not n or not room or not self._max_draws or self._bounds.limit is not None:
            return _NOWHERE
        draws = -(-room // n)
        if draws > self._max_draws:
            return _NOWHERE
        places = self.candidates()
        left = self._max_draws - self._times.values[places]
        return places[left >= draws]

    def _race(self, n: int, rng: np.random.Generator, due: np.ndarray) -> np.ndarray:
        """Draw a large part of the pool by successive sampling: the order of finish in a race.

        Finish times are exponential with the masses as rates (Efraimidis and Spirakis 2006). Units
        that are `due` are always drawn.
        """
        places = self.candidates()
        masses = self._filled(self._mass_of(places), self._heavy())
        places, masses = places[masses > 0], masses[masses > 0]
        with np.errstate(over="ignore"):  # a tiny mass comes last
            # `random` may return 0 but never 1, so the logarithm is finite.
            times = -np.log1p(-rng.random(len(places))) / masses
        places = places[np.argsort(times, kind="stable")]
        is_due = np.isin(places, due)
        others = np.cumsum(~is_due) <= n - is_due.sum()
        return places[is_due | others]

    def chances(self, places: np.ndarray) -> np.ndarray:
        """Return the probability of each place in a single draw from the whole pool."""
        heavy = self._heavy()
        # `cumsum` for the same reason as in `_sum`.
        total = np.cumsum(self._sums["mass"] + heavy * self._sums["unknown"])[-1:]
        return self._filled(self._mass_of(places), heavy) / total

    def _accept(
        self, drawn: np.ndarray, places: np.ndarray, *, replacement: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return all places drawn so far, in order, and the places that may not be drawn again."""
        all_ = np.concatenate([drawn, places])
        if replacement and self._max_draws is None:
            return all_, _NOWHERE
        room = 1 if self._max_draws is None else self._max_draws - self._times.values[all_]
        room = room if replacement else np.ones(len(all_), np.int64)
        nth = repeats(all_)
        return all_[nth < room], np.unique(all_[nth == room - 1])

    # sums

    def _grow(self) -> None:
        self._dirty[self._size // BLOCK :] = True  # the last block may have grown
        self._size = len(self._drawable)
        blocks = len(self._drawable.blocks)
        new = blocks - len(self._dirty)
        if new > 0:
            self._dirty = np.append(self._dirty, np.ones(new, np.bool_))
            self._sums = np.append(self._sums, np.zeros(new, _SUMS))

    def _sum_again(self) -> None:
        dirty = np.flatnonzero(self._dirty)
        for start in range(0, len(dirty), _AT_ONCE):
            self._sum(dirty[start : start + _AT_ONCE])
        self._dirty[dirty] = False

    def _sum(self, blocks: np.ndarray) -> None:
        sums = np.zeros(len(blocks), _SUMS)
        all_ = self._drawable.blocks[blocks]
        times, versions = self._times.blocks[blocks], self._versions.blocks[blocks]
        near = all_ & self._near(blocks)
        open_ = near if self._max_draws is None else near & (times < self._max_draws)
        oldest = self._bounds.oldest
        fresh = open_ if oldest is None else open_ & (versions >= oldest)
        sums["all"], sums["drawable"] = all_.sum(1), near.sum(1)
        sums["open"], sums["fresh"] = open_.sum(1), fresh.sum(1)
        sums["low"] = np.where(all_, versions, NO_VERSION).min(1)
        sums["high"] = np.where(all_, versions, -NO_VERSION).max(1)
        sums["least"] = np.where(fresh, times, _NEVER).min(1)
        chance = fresh
        sums["mass"] = sums["fresh"]
        if self._masses is not None:
            mass = np.where(fresh, self._masses.blocks[blocks], 0.0)
            unknown = np.isnan(mass)
            known = np.where(unknown, 0.0, mass)
            chance = unknown | (known > 0)
            # not `sum`, whose pairwise order depends on the machine: draws must repeat anywhere
            sums["mass"] = np.cumsum(known, axis=1)[:, -1]
            sums["unknown"], sums["heavy"] = unknown.sum(1), known.max(1)
        sums["size"] = chance.sum(1)
        sums["times"] = np.where(chance, times, 0).sum(1)
        self._sums[blocks] = sums

    def _near(self, blocks: np.ndarray) -> np.ndarray:
        limit = self._bounds.limit
        if limit is None:
            return np.ones((len(blocks), 1), np.bool_)
        return (blocks[:, None] * BLOCK + np.arange(BLOCK)) < limit

    def _may(self, blocks: np.ndarray) -> np.ndarray:
        """Return which units of these blocks may be drawn, whatever their mass."""
        may = self._drawable.blocks[blocks] & self._near(blocks)
        if self._max_draws is not None:
            may &= self._times.blocks[blocks] < self._max_draws
        if self._bounds.oldest is not None:
            may &= self._versions.blocks[blocks] >= self._bounds.oldest
        return may

    def _inside(self, blocks: np.ndarray, gone: np.ndarray, heavy: float) -> np.ndarray:
        """Return the running sums of mass within blocks; what is gone has none."""
        may = self._may(blocks)
        in_ = gone[np.isin(gone // BLOCK, blocks)]
        may[np.searchsorted(blocks, in_ // BLOCK), in_ % BLOCK] = False
        if self._masses is None:
            return np.cumsum(may, axis=1, dtype=np.float64)
        masses = self._filled(self._masses.blocks[blocks], heavy)
        return np.cumsum(np.where(may, masses, 0.0), axis=1)

    def _heavy(self) -> float:
        """Return the mass of units whose priority is not known."""
        return float(self._sums["heavy"].max(initial=0.0)) or 1.0

    def _mass_of(self, places: np.ndarray) -> np.ndarray:
        if self._masses is None:
            return np.ones(len(places))
        return self._masses.values[places]

    @staticmethod
    def _filled(masses: np.ndarray, heavy: float) -> np.ndarray:
        return np.where(np.isnan(masses), heavy, masses)

    def _limit(self, horizon: int | None) -> int | None:
        """Return the place after the `horizon`-th drawable unit."""
        if horizon is None:
            return None
        # Not `drawable`, which is counted up to this very limit.
        ends = np.cumsum(self._sums["all"])
        block = int(np.searchsorted(ends, horizon, side="left"))
        if horizon <= 0 or block == len(ends):
            return 0 if horizon <= 0 else None
        before = int(ends[block] - self._sums["all"][block])
        inside = np.flatnonzero(self._drawable.blocks[block])
        return block * BLOCK + int(inside[horizon - before - 1]) + 1

    def _differ(self, bounds: Bounds) -> np.ndarray:
        """Return the blocks in which these bounds change which units may be drawn."""
        old, new = self._bounds, bounds
        differ = np.zeros(len(self._sums), np.bool_)
        if old.oldest != new.oldest:
            a, b = sorted(-NO_VERSION if o is None else o for o in (old.oldest, new.oldest))
            differ |= (self._sums["low"] < b) & (self._sums["high"] >= a)
        if old.limit != new.limit:
            end = len(differ) * BLOCK
            a, b = sorted(end if x is None else x for x in (old.limit, new.limit))
            differ[a // BLOCK : b // BLOCK + 1] = True
        return differ


def _places(blocks: np.ndarray, may: np.ndarray) -> np.ndarray:
    rows, columns = np.nonzero(may)
    return blocks[rows] * BLOCK + columns


_FIRST = 64
"""Blocks that are looked through together for the first units."""
_NOWHERE = np.empty(0, np.int64)
_COUNTS = ("all", "drawable", "open", "fresh", "size", "unknown", "low", "high", "least")
_SUMS = np.dtype(
    [*((name, np.int32) for name in _COUNTS), ("times", np.int64), ("mass", np.float64),
     ("heavy", np.float64)]
)  # fmt: skip

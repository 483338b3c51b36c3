"""Mixtures: the rows of a step come from several named sources with fixed shares."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, gcd, lcm
from typing import Any, TypeVar

import numpy as np
import polars as pl

from ..errors import QueryError, StarvedError, nearest
from ..side_columns import SideColumn
from ..store import Store
from .draw import Draw, Freshness, Order, Supply, check_size
from .sampler import Sampler
from .strategies import Strategy, canonical

_TOLERANCE = 1e-6
_FINEST = 10_000
"""Shares are taken as the nearest fractions with at most this denominator."""
_GOLDEN = 0.6180339887498949
_LOOKS = 50
"""How often sources are refreshed until all see the same versions while others write."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of a mixture: its share, and the options of its own `Sampler`."""

    share: float
    run_id: str | None = None
    where: str | None = None
    query: str | None = None
    at: str | Mapping[str, int] | None = None
    """A snapshot, or versions by table: rows as they were then. None: as they are now."""
    strategy: Strategy | None = None
    freshness: Freshness | None = None
    with_columns: Sequence[str | SideColumn] = ()
    max_draws: int | None = 1
    order: Order | None = None
    is_paced: bool = False
    """Whether `horizon` applies: its rows are generated while they are drawn."""


class Mixture:
    """Draws from several sources with shares that hold exactly over many steps.

    In each step, the share of a source is rounded down or up; the rounding is a function of the
    step alone, and evens out. Draw counts, probabilities and importance weights are computed within
    each source. The interface is that of `Sampler`.
    """

    def __init__(
        self,
        store: Store,
        sources: Mapping[str, Source],
        *,
        grouped: bool = False,
        table: str = "experiences",
        seed: int = 0,
        until: Mapping[str, int] | None = None,
    ) -> None:
        """Raise QueryError for shares that are not positive or do not add up to 1."""
        _check_shares(sources)
        # sorted: what is drawn must not depend on the order in a configuration
        self._sources = {name: sources[name] for name in sorted(sources)}
        self._shares = _fractions(s.share for s in self._sources.values())
        self._samplers = {
            name: Sampler(
                store if source.at is None else store.at(source.at),
                strategy=source.strategy,
                freshness=source.freshness,
                grouped=grouped,
                table=table,
                where=source.where,
                query=source.query,
                run_id=source.run_id,
                with_columns=source.with_columns,
                max_draws=source.max_draws,
                seed=seed,
                name=name,
                # a source at a snapshot is in the past already
                until=until if source.at is None else None,
                order=source.order,
            )
            for name, source in self._sources.items()
        }
        self._unit = next(iter(self._samplers.values())).unit

    @property
    def drawn_from(self) -> dict[str, int]:
        """The version of each table that was looked at last, by sources of the present."""
        versions: dict[str, int] = {}
        for _, sampler in self._present():
            versions |= sampler.drawn_from
        return dict(sorted(versions.items()))

    @property
    def nbytes(self) -> int:
        """Bytes of all indexes."""
        return sum(sampler.nbytes for sampler in self._samplers.values())

    def describe(self) -> str:
        """Return how rows are chosen, with all parameters, as canonical JSON text."""
        return canonical(self.parameters())

    def parameters(self) -> dict[str, Any]:
        """Return what describes it, as values of JSON."""
        message = {}
        for name, source in self._sources.items():
            at = source.at if source.at is None or isinstance(source.at, str) else dict(source.at)
            known = {"share": source.share, "at": at, **self._samplers[name].parameters()}
            message[name] = {k: v for k, v in known.items() if v is not None}
        return {"strategy": "mixed", "sources": message}

    def split(self, n: int, step: int) -> dict[str, int]:
        """Return how many units each source gives to a step of `n`."""
        return split({name: source.share for name, source in self._sources.items()}, n, step)

    def supply(
        self, n: int, policy_version: int, *, step: int = 1, horizon: int | None = None
    ) -> Supply:
        """Return the supply for `step` of `n` units, in total and of each source."""
        self._refresh()
        return self._count(self.split(n, step), policy_version, horizon)

    def check(self, n: int) -> None:
        """Raise QueryError when it is certain that no step can ever draw `n` units."""
        check_size(n, self._unit)
        for (name, sampler), share in zip(self._samplers.items(), self._shares, strict=True):
            try:
                # Rounded down: some steps take no more than this from the source.
                sampler.check(max(1, floor(n * share)))
            except QueryError as error:
                raise QueryError(f"source `{name}`: {error}") from error

    def draw(
        self, n: int, *, step: int, policy_version: int, horizon: int | None = None
    ) -> Draw | None:
        """Draw `n` units for a step, or None when a source has too few fresh ones."""
        check_size(n, self._unit)
        self._refresh()
        counts = self.split(n, step)
        if not self._count(counts, policy_version, horizon).enough:
            return None
        parts = [
            sampler.choose(
                counts[name],
                step=step,
                policy_version=policy_version,
                horizon=self._horizon(name, horizon),
            )
            for name, sampler in self._samplers.items()
            if counts[name]
        ]
        return self._joined(step, [part for part in parts if part is not None])

    def redraw(
        self,
        ids: Sequence[str],
        *,
        step: int,
        weights: Sequence[float] | None = None,
        sources: Sequence[str | None] | None = None,
        drawn_from: Mapping[str, int] | None = None,
    ) -> Draw:
        """Draw again what an earlier attempt drew for this step; the rest is as recorded."""
        self._refresh()
        message = weights if weights is not None else [1.0] * len(ids)
        parts = [
            self._samplers[name].redraw(
                [ids[i] for i in at], step=step, weights=[message[i] for i in at]
            )
            for name, at in self._by_source(ids, sources)
        ]
        draw = self._joined(step, parts)
        return replace(draw, drawn_from=dict(drawn_from)) if drawn_from else draw

    def restore(self, ids: Sequence[str], *, sources: Sequence[str | None] | None = None) -> None:
        """Count these rows as drawn from their sources, once for each time they are listed."""
        for name, at in self._by_source(ids, sources):
            self._samplers[name].restore([ids[i] for i in at])

    def read(self, draw: Draw, columns: Sequence[str]) -> pl.DataFrame:
        """Read the payload of a draw, one row for each of `row_ids`, in order."""

        def read(sampler: Sampler, at: np.ndarray) -> pl.DataFrame:
            part = replace(draw, row_ids=draw.row_ids[at], allowed=draw.allowed[at])
            return sampler.read(part, columns)

        return self._each(draw, read)

    def with_sides(self, draw: Draw, rows: pl.DataFrame) -> pl.DataFrame:
        """Add the side columns of each source to its rows of `read`, as for a `Sampler`."""
        return self._each(draw, lambda sampler, at: sampler.with_sides(draw, rows[at]))

    def _each(
        self, draw: Draw, read: Callable[[Sampler, np.ndarray], pl.DataFrame]
    ) -> pl.DataFrame:
        """Let each source read its rows of a draw, and put them in the draw's order."""
        parts, places = [], []
        names = np.array(draw.sources, dtype=object)
        for name in dict.fromkeys(draw.sources):
            places.append(np.flatnonzero(names == name))
            parts.append(read(self._samplers[str(name)], places[-1]))
        order = np.argsort(np.concatenate(places), kind="stable")
        return pl.concat(parts, how="diagonal_relaxed")[order]

    def _refresh(self) -> None:
        """Bring all sources to the same versions of the tables that they share."""
        # with different versions, `drawn_from` could not name one version, nor the draw be repeated
        for _ in range(_LOOKS):
            for sampler in self._samplers.values():
                sampler.refresh()
            seen = [sampler.drawn_from for _, sampler in self._present()]
            joined: dict[str, int] = {}
            for versions in seen:
                joined = versions | joined
            if all(joined[name] == v for versions in seen for name, v in versions.items()):
                return
        raise StarvedError(
            f"{len(self._samplers)} sources of a mixture looked {_LOOKS} times, and others wrote "
            "meanwhile each time; write in larger batches"
        )

    def _present(self) -> Iterator[tuple[str, Sampler]]:
        """Yield the sources that see the store as it is now."""
        for name, source in self._sources.items():
            if source.at is None:
                yield name, self._samplers[name]

    def _horizon(self, name: str, horizon: int | None) -> int | None:
        return horizon if self._sources[name].is_paced else None

    def _count(self, counts: dict[str, int], policy_version: int, horizon: int | None) -> Supply:
        parts = {
            name: sampler.count(
                counts[name], policy_version, horizon=self._horizon(name, horizon)
            )
            for name, sampler in self._samplers.items()
        }  # fmt: skip

        each = parts.values()
        return Supply(
            sum(counts.values()),
            sum(part.fresh for part in each),
            sum(part.stale for part in each),
            sum(part.used_up for part in each),
            self._unit,
            weightless=sum(part.weightless for part in each),
            parts=parts,
        )

    def _by_source(
        self, ids: Sequence[str], sources: Sequence[str | None] | None
    ) -> Iterator[tuple[str, list[int]]]:
        """Yield each source with the places of its rows, in the order in which they come."""
        if sources is None or len(sources) != len(ids):
            raise QueryError("a mixture draws again by the recorded `sources`, one for each row")
        for name in dict.fromkeys(sources):
            if name not in self._samplers:
                raise QueryError(
                    f"rows were drawn from a source `{name}`, which the mixture has not"
                    f"{nearest(str(name), self._samplers)}"
                )
            yield str(name), [i for i, source in enumerate(sources) if source == name]

    def _joined(self, step: int, parts: list[Draw]) -> Draw:
        def joined(of: Callable[[Draw], np.ndarray]) -> np.ndarray:
            return np.concatenate([of(part) for part in parts]) if parts else np.empty(0)

        return Draw(
            step,
            joined(lambda part: part.row_ids),
            joined(lambda part: part.allowed),
            joined(lambda part: part.weights),
            joined(lambda part: part.epochs),
            tuple(name for part in parts for name in part.sources),
            self.drawn_from,
        )


def split(shares: Mapping[str, float], n: int, step: int) -> dict[str, int]:
    """Return how many of `n` units each source gives to a step.

    Units left after rounding down are assigned by systematic sampling, whose start cycles through
    all offsets: over one period the shares are exact.

    >>> [split({"expert": 0.25, "own": 0.75}, 2, step)["expert"] for step in range(1, 5)]
    [1, 0, 1, 0]
    """
    names = sorted(shares)
    quotas = [n * share for share in _fractions(shares[name] for name in names)]
    counts = [floor(quota) for quota in quotas]
    rests = [quota - count for quota, count in zip(quotas, counts, strict=True)]
    edge = _walk(step, lcm(*(rest.denominator for rest in rests)))
    for i, rest in enumerate(rests):
        counts[i] += floor(edge + rest) - floor(edge)
        edge += rest
    return dict(zip(names, counts, strict=True))


def most(shares: Mapping[str, float], n: int) -> dict[str, int]:
    """Return the most of `n` units that each source gives to any step.

    >>> most({"expert": 0.25, "own": 0.75}, 2)
    {'expert': 1, 'own': 2}
    """
    names = sorted(shares)
    fractions = _fractions(shares[name] for name in names)
    return {name: ceil(n * share) for name, share in zip(names, fractions, strict=True)}


def _fractions(shares: Iterable[float]) -> list[Fraction]:
    # exact: with floats, rounding would add up over steps, and no period would be whole
    parts = [Fraction(share).limit_denominator(_FINEST) for share in shares]
    return [part / sum(parts) for part in parts]


def _check_shares(sources: Mapping[str, Source]) -> None:
    if not sources:
        raise QueryError("a mixture needs one source or more, got none")
    for name, source in sources.items():
        if not (np.isfinite(source.share) and source.share > 0):
            raise QueryError(f"the share of source `{name}` must be above 0, got {source.share}")
    total = sum(source.share for source in sources.values())
    if abs(total - 1) > _TOLERANCE:
        message = " + ".join(f"{source.share:g}" for source in sources.values())
        raise QueryError(f"the shares of a mixture must add up to 1, got {message} = {total:g}")


def _walk(step: int, period: int) -> Fraction:
    """Return a fraction in [0, 1) for a step; over a period, each multiple occurs once."""
    # near the golden ratio, so that rounding up is spread evenly over steps; coprime to the period,
    # so that each offset occurs exactly once
    stride = max(1, round(period * _GOLDEN))
    while gcd(stride, period) > 1:
        stride += 1
    return Fraction(step * stride % period, period)

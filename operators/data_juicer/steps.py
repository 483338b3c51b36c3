"""Apply Data-Juicer's filters and mappers to batches of samples, one after the other."""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np

from ...store.errors import OperatorError
from . import registry

STATS, META, CONTEXT = "__dj__stats__", "__dj__meta__", "__dj__context__"
"""Data-Juicer's fields for statistics, tags and what operators share."""

NOTHING = "__dj__nothing"
"""Field of samples of which an operator reads no text."""

Samples = dict[str, list[Any]]
"""A batch as Data-Juicer takes it: the values of each field, one a sample."""


@dataclass
class Step:
    """An instance of one of Data-Juicer's filters or mappers."""

    name: str
    params: Mapping[str, Any]
    op: Any = field(init=False)

    def __post_init__(self) -> None:
        self.op = registry.build(self.name, self.params)

    def __reduce__(self) -> tuple[type["Step"], tuple[str, Mapping[str, Any]]]:
        # rebuilt where it is unpickled, so that the guards also hold in that process
        return Step, (self.name, self.params)

    @property
    def is_filter(self) -> bool:
        """Whether it is a filter, else a mapper."""
        return registry.kind_of(self.op) == "filter"

    @cached_property
    def makes_rows(self) -> bool:
        """Whether it may return another number of samples than it was given."""
        if self.is_filter or not self.op.is_batched_op():
            return False
        return _returns_others(type(self.op).process_batched)

    def run(self, samples: Samples) -> tuple[Samples, list[bool] | None]:
        """Return the samples with what it wrote and, of a filter, which to keep."""
        if self.is_filter:
            return self._filtered(samples)
        if self._is_tagging and META not in samples:
            samples[META] = [{} for _ in range(size(samples))]
        if self.op.is_batched_op():
            return dict(self.op.process_batched(samples)), None
        return _together([self.op.process_single(one) for one in _apart(samples)]), None

    @property
    def _is_tagging(self) -> bool:
        from data_juicer.ops import TAGGING_OPS

        return self.name in TAGGING_OPS.modules

    def _filtered(self, samples: Samples) -> tuple[Samples, list[bool]]:
        samples.setdefault(STATS, [{} for _ in range(size(samples))])
        if self.op.is_batched_op():
            shared = {"context": True} if CONTEXT in samples and self._shares else {}
            done = self.op.compute_stats_batched(samples, **shared)
            return done, [bool(keep) for keep in self.op.process_batched(done)]
        ones = [self.op.compute_stats_single(one) for one in _apart(samples)]
        return _together(ones) or samples, [bool(self.op.process_single(one)) for one in ones]

    @cached_property
    def _shares(self) -> bool:
        return "context" in inspect.signature(self.op.compute_stats_batched).parameters

    def reason(self, stats: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
        """Say why a sample was not kept, with its statistic."""
        message = ", ".join(f"{name} {_short(value)}" for name, value in stats.items())
        if len(stats) == 1 and (interval := self._interval):
            return f"{message} {interval}"
        if not stats:
            named = [v for k, v in self.params.items() if k == "field_key" and v in fields]
            message = ", ".join(f"{name} {_short(fields[name])}" for name in named)
        params = ", ".join(f"{k}={_short(v)}" for k, v in self.params.items())
        return f"{message}{': ' if message else ''}not kept by {self.name}({params})"

    @cached_property
    def _interval(self) -> str:
        """Return the bounds of a filter that has one lower, or one upper, or both; else nothing."""
        names = [
            n
            for n in inspect.signature(type(self.op).__init__).parameters
            if n.startswith(("min_", "max_")) and not n.endswith("closed_interval")
        ]
        low, high = ([n for n in names if n.startswith(side)] for side in ("min_", "max_"))
        if not names or max(len(low), len(high)) > 1:
            return ""
        given = [getattr(self.op, n[0], None) if n else None for n in (low, high)]
        is_inside = not self.op.reversed_range
        closed = self.op.min_closed_interval, self.op.max_closed_interval
        left = "(-∞" if given[0] is None else f"{'[' if closed[0] else '('}{_bound(given[0])}"
        is_open = given[1] is None or given[1] >= np.iinfo(np.int64).max
        right = "∞)" if is_open else f"{_bound(given[1])}{']' if closed[1] else ')'}"
        return f"{'not in' if is_inside else 'in'} {left}, {right}"


@dataclass(frozen=True)
class Done:
    """The result of steps."""

    samples: Samples
    """The samples that were kept."""
    places: list[int]
    """Their indices among the given samples."""
    stats: list[dict[str, Any]]
    """Statistics of every given sample, including those that were not kept."""
    reasons: dict[int, str]
    """The reason why a sample was not kept, by its index."""


def run(steps: Sequence[Step], samples: Samples) -> Done:
    """Call steps on samples, each on those that are left; filters in a row share what they parse.

    Raises OperatorError when a step changes the number of samples.
    """
    places, reasons = list(range(size(samples))), {}
    stats: list[dict[str, Any]] = [{} for _ in places]
    given = {name for one in samples.get(STATS, ())[:1] for name in one}
    if len(steps) > 1:
        samples[CONTEXT] = [{} for _ in places]
    for step in steps:
        before = len(places)
        if not before:
            break
        samples, keep = step.run(samples)
        if size(samples) != before:
            raise OperatorError(
                f"Data-Juicer's `{step.name}` made {size(samples)} samples of {before}; expected "
                "as many"
            )
        if keep is None:
            # a mapper changed the texts, so what earlier filters parsed is stale
            samples |= {CONTEXT: [{} for _ in places]} if CONTEXT in samples else {}
            continue
        own = _new_stats(samples, stats, places, given)
        for i in (i for i, kept in enumerate(keep) if not kept):
            fields = {name: values[i] for name, values in samples.items()}
            reasons[places[i]] = step.reason(own[i], fields)
        if not all(keep):
            samples = {name: list(compress(values, keep)) for name, values in samples.items()}
            places = list(compress(places, keep))
    samples.pop(CONTEXT, None)
    return Done(samples, places, stats, reasons)


def put(samples: Samples, name: str, values: Sequence[Any]) -> None:
    """Set a field; one of statistics or tags, as `__dj__stats__.text_len`, within its mapping."""
    home, _, key = name.partition(".")
    if home in (STATS, META) and key:
        homes = samples.setdefault(home, [{} for _ in values])
        for one, value in zip(homes, values, strict=True):
            one[key] = value
    else:
        samples[name] = list(values)


def size(samples: Samples) -> int:
    """Return how many samples a batch has."""
    return len(next(iter(samples.values()), ()))


def plain(value: Any) -> Any:
    """Return a value as Python's own: its statistics may be NumPy's."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value


def _new_stats(
    samples: Samples, stats: list[dict[str, Any]], places: list[int], known: set[str]
) -> list[dict[str, Any]]:
    """Note the statistics of samples by their places, and return those that are new."""
    if not known and not any(stats):  # most often: there is nothing to compare with
        for place, given in zip(places, samples[STATS], strict=True):
            stats[place] = dict(given)
        return samples[STATS]
    found: list[dict[str, Any]] = []
    for place, given in zip(places, samples[STATS], strict=True):
        own = {n: v for n, v in given.items() if n not in known and n not in stats[place]}
        stats[place].update(own)
        found.append(own)
    return found


def _apart(samples: Samples) -> Iterator[dict[str, Any]]:
    for values in zip(*samples.values(), strict=True):
        yield dict(zip(samples, values, strict=True))


def _together(ones: Sequence[Mapping[str, Any]]) -> Samples:
    names = dict.fromkeys(name for one in ones for name in one)
    return {name: [one.get(name) for one in ones] for name in names}


def _returns_others(method: Any) -> bool:
    """Return whether a batched method may change the number of samples, judging by its source.

    One that does not change it returns the batch that it was given, and chains no lists.
    """
    [tree] = ast.parse(textwrap.dedent(registry.source_of(method))).body
    assert isinstance(tree, ast.FunctionDef)
    given = tree.args.args[1].arg
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    return "chain" in names or _returned(tree.body) != {given}


def _returned(body: Sequence[ast.stmt]) -> set[str]:
    """Return what the statements return, functions within them left out."""
    found: set[str] = set()
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            continue
        if isinstance(statement, ast.Return) and statement.value is not None:
            found.add(ast.unparse(statement.value))
        for part in ast.iter_child_nodes(statement):
            if isinstance(part, ast.stmt):
                found |= _returned([part])
            elif isinstance(part, ast.ExceptHandler):
                found |= _returned(part.body)
    return found


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str | int):
        return repr(value)[:60]
    return json.dumps(plain(value), ensure_ascii=False, default=str)[:60]


def _bound(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

"""An in-memory stand-in for Hugging Face's `Dataset`, without files or processes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from .steps import Samples, size

PLACE = "place_of_the_sample"
"""Field with the original index of a sample."""


class Dataset:
    """The part of `Dataset` that deduplicators, selectors and groupers call."""

    def __init__(self, samples: Samples, *, places: Sequence[int] | None = None) -> None:
        given = range(size(samples)) if places is None else places
        self.samples: Samples = {**samples, PLACE: list(given)}

    @property
    def places(self) -> list[int]:
        """Which of the samples that were given first are left, in their order."""
        return self.samples[PLACE]

    @property
    def features(self) -> Mapping[str, Any]:
        """The fields, as far as their names matter."""
        return self.samples

    @property
    def column_names(self) -> list[str]:
        """The names of the fields."""
        return list(self.samples)

    @property
    def num_rows(self) -> int:
        """How many samples there are."""
        return len(self)

    def __len__(self) -> int:
        return size(self.samples)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.samples[key]
        if isinstance(key, slice):
            return {name: values[key] for name, values in self.samples.items()}
        return {name: values[int(key)] for name, values in self.samples.items()}

    def select(self, indices: Iterable[int], **_: Any) -> Self:
        """Return the samples at some places."""
        chosen = [int(i) for i in indices]
        return self._of({n: [v[i] for i in chosen] for n, v in self.samples.items()})

    def filter(
        self,
        function: Callable[..., bool],
        with_indices: bool = False,  # noqa: FBT001, FBT002 - its callers' signature
        fn_kwargs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> Self:
        """Return the samples for which a function is true."""
        more = fn_kwargs or {}
        return self.select(
            i
            for i, one in enumerate(self)
            if function(*((one, i) if with_indices else (one,)), **more)
        )

    def map(
        self, function: Callable[..., Any], fn_kwargs: Mapping[str, Any] | None = None, **_: Any
    ) -> Self:
        """Return what a function makes of each sample."""
        made = [function(one, **(fn_kwargs or {})) for one in self]
        return self._of({name: [one[name] for one in made] for name in made[0]} if made else {})

    def remove_columns(self, names: str | Sequence[str]) -> Self:
        """Return the samples without some fields."""
        gone = {names} if isinstance(names, str) else set(names)
        return self._of({n: v for n, v in self.samples.items() if n not in gone})

    def shuffle(self, seed: int | None = None, **_: Any) -> Self:
        """Return the samples in the order that Hugging Face's `Dataset` has for the same seed."""
        return self.select(np.random.default_rng(seed).permutation(len(self)))

    def to_list(self) -> list[dict[str, Any]]:
        """Return the samples as mappings."""
        return list(self)

    def _of(self, samples: Samples) -> Self:
        return type(self)(
            {n: v for n, v in samples.items() if n != PLACE}, places=samples.get(PLACE)
        )

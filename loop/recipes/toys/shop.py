"""A small shop: its products, and what customers want of it."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ....store import Task

_KINDS = ("mug", "lamp", "shirt", "chair", "kettle", "blanket", "clock", "basket")
_COLORS = ("red", "blue", "green", "black", "white", "pink")
_SIZES = ("small", "medium", "large")
_QUALITIES = ("cotton", "handmade", "folding", "washable", "light", "sturdy", "striped", "vintage")


def products(*, count: int = 64, seed: int = 0) -> list[dict[str, Any]]:
    """Return products with two attributes each; the product p00 is a mug, p01 a lamp.

    >>> products(count=1)[0]["title"], products(count=1)[0]["options"]["size"]
    ('vintage sturdy mug', ['small', 'medium', 'large'])
    """
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        kind = _KINDS[i % len(_KINDS)]
        qualities = sorted(rng.choice(_QUALITIES, 2, replace=False).tolist(), reverse=True)
        colors = sorted(rng.choice(_COLORS, 3, replace=False).tolist())
        made.append(
            {
                "product_id": f"p{i:02d}",
                "title": f"{' '.join(qualities)} {kind}",
                "category": kind,
                "attributes": qualities,
                "options": {"color": colors, "size": list(_SIZES)},
                "price": round(float(rng.uniform(5, 50)), 2),
            }
        )
    return made


def errands(
    *,
    count: int = 200,
    held_out: int = 40,
    products_count: int = 64,
    seed: int = 0,
    taskset: str = "errands",
) -> Iterator[Task]:
    """Yield what customers want of `products`, for `shopping`; `held_out` have the split `eval`.

    >>> next(errands(held_out=1)).prompt_text
    'I want a vintage cotton clock, color pink, size large, for at most 26 dollars.'
    """
    rng = np.random.default_rng(seed + 1)
    stock = products(count=products_count, seed=seed)
    wanted: dict[str, dict[str, Any]] = {}
    while len(wanted) < count:
        one = stock[int(rng.integers(len(stock)))]
        options = {name: str(rng.choice(values)) for name, values in one["options"].items()}
        limit = int(one["price"]) + int(rng.integers(1, 10))
        goal = {k: one[k] for k in ("product_id", "title", "category", "attributes")}
        said = ", ".join(f"{name} {value}" for name, value in options.items())
        prompt = f"I want a {one['title']}, {said}, for at most {limit} dollars."
        wanted[prompt] = {**goal, "options": options, "max_price": float(limit)}
    for i, (prompt, goal) in enumerate(wanted.items()):
        split = "eval" if i < held_out else "train"
        yield Task.ask(prompt, taskset=taskset, split=split, metadata={"shopping": goal})

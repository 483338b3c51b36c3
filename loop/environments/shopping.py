"""A shop over a table of products: the actions and the reward of WebShop (arXiv:2207.01206)."""

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from ...store.errors import JobError
from ...store.records import Task
from .text_game import Scene, TextGameEnvironment
from .text_index import TableSpec, TextIndex, table_rows

_KEY = "shopping"
_COLUMNS = ("product_id", "title", "category", "attributes", "options", "price")
_ACTION = re.compile(r"(search|click)\s*\[(.*?)\]", re.IGNORECASE)
_WORD = re.compile(r"\w+")
_BUY, _BACK, _NEXT, _PREVIOUS = "buy now", "back to search", "next", "previous"


def shopping(
    *, products: TableSpec, page_size: int = 5, max_steps: int = 15, **parameters: Any
) -> TextGameEnvironment:
    """Shop as in WebShop: `{shopping: {products: products.parquet, page_size: 5}}`.

    An answer is `search[words]` or `click[what]`, where what is a product, an option, or a button
    of the page. `products` is a file or a function with the columns product_id, title, category,
    attributes (a list), options (lists by name, such as `{color: [red, blue]}`, or that as JSON)
    and price. The task's metadata have `shopping`: `{product_id, title, category, attributes,
    options, max_price}`, of which the product is for the expert alone. The reward comes with the
    purchase (`purchase_reward`), and is 0 without one.
    """
    shop = _indexed(json.dumps(products, sort_keys=True))
    return TextGameEnvironment(
        _Shop(shop, page_size), **{"show": ("text",), "max_steps": max_steps, **parameters}
    )


def purchase_reward(
    goal: Mapping[str, Any], product: Mapping[str, Any], options: Mapping[str, str]
) -> float:
    """Return WebShop's reward of a purchase, from 0 to 1 (equation 1 of the paper).

    It is the share of the wanted attributes and options, and of the price limit, that are met,
    times 1 if the product is of the wanted kind, 0.5 if its title has at most a fifth of the wanted
    words and the category differs, 0.1 below a tenth, and 0 without a common word. Words stand for
    WebShop's nouns, and the category for its comparison of searches.

    >>> goal = {"title": "red mug", "category": "mug", "attributes": ["glazed"],
    ...         "options": {"size": "large"}, "max_price": 9.0}
    >>> mug = {"title": "red mug", "category": "mug", "attributes": ["glazed"], "price": 12.0}
    >>> purchase_reward(goal, mug, {"size": "large"}), purchase_reward(goal, mug, {})
    (0.6666666666666666, 0.3333333333333333)
    """
    wanted, title = (set(_WORD.findall(row["title"].lower())) for row in (goal, product))
    match = len(wanted & title) / max(len(wanted), 1)
    kind = 1.0
    if match == 0:
        kind = 0.0
    elif match < 0.1:
        kind = 0.1
    elif match <= 0.2 and goal["category"] != product["category"]:
        kind = 0.5
    met = len(set(goal["attributes"]) & set(product["attributes"]))
    met += sum(options.get(name) == value for name, value in goal["options"].items())
    met += product["price"] <= goal["max_price"]
    return kind * met / (len(goal["attributes"]) + len(goal["options"]) + 1)


class _Shop:
    def __init__(self, index: TextIndex, page_size: int) -> None:
        self._index, self._page_size = index, page_size
        self._goal: dict[str, Any] = {}
        self._found: list[dict[str, Any]] = []
        self._page = 0
        self._product: dict[str, Any] | None = None
        self._chosen: dict[str, str] = {}

    def begin(self, task: Task) -> Scene:
        goal = (task.metadata or {}).get(_KEY)
        if not isinstance(goal, Mapping):
            raise JobError(f"task {task.task_id} has no `{_KEY}` in its metadata")
        self._goal, self._found, self._product = dict(goal), [], None
        return self._shown()

    def act(self, command: str) -> Scene:
        action = _ACTION.search(command)
        what = action[2].strip().lower() if action else ""
        if action and action[1].lower() == "search":
            most = 10 * self._page_size
            self._found, self._page, self._product = self._index.search(what, most=most), 0, None
            return self._shown("" if self._found else "Nothing was found.")
        if what == _BUY and self._product is not None:
            score = purchase_reward(self._goal, self._product, self._chosen)
            return Scene(text="You bought it.", score=score, is_done=True)
        if action and self._clicked(what):
            return self._shown()
        return self._shown(f"`{command[:60]}` is not possible here.", is_refused=True)

    def hint(self) -> str | None:
        goal, product = self._goal, self._product
        if product is not None and product["product_id"] == goal["product_id"]:
            left = [v for k, v in goal["options"].items() if self._chosen.get(k) != v]
            return f"click[{left[0] if left else _BUY}]"
        if product is not None or not self._found:
            return f"search[{goal['title']}]"
        ids = [row["product_id"] for row in self._listed()]
        return f"click[{goal['product_id'] if goal['product_id'] in ids else _NEXT}]"

    def close(self) -> None:
        self._found = []

    def _clicked(self, what: str) -> bool:
        """Follow a button of the page; return False if it has none of this name."""
        if self._product is None:
            chosen = [row for row in self._listed() if row["product_id"].lower() == what]
            if chosen:
                self._product, self._chosen = chosen[0], {}
                return True
            turned = self._page + {_NEXT: 1, _PREVIOUS: -1}.get(what, 0)
            if turned == self._page or not 0 <= turned * self._page_size < len(self._found):
                return False
            self._page = turned
            return True
        if what in (_BACK, _PREVIOUS):
            self._product, self._found = None, self._found if what == _PREVIOUS else []
            return True
        for name, values in options_of(self._product).items():
            if what in (str(value).lower() for value in values):
                self._chosen[name] = next(v for v in values if str(v).lower() == what)
                return True
        return False

    def _listed(self) -> list[dict[str, Any]]:
        return self._found[self._page * self._page_size :][: self._page_size]

    def _shown(self, note: str = "", *, is_refused: bool = False) -> Scene:
        lines = [note] if note else []
        if self._product is not None:
            lines += [f"{self._product['title']}, ${self._product['price']:.2f}"]
            lines += [f"attributes: {', '.join(self._product['attributes'])}"]
            for name, values in options_of(self._product).items():
                marked = (f"[{v}]*" if self._chosen.get(name) == v else f"[{v}]" for v in values)
                lines.append(f"{name}: {' '.join(marked)}")
            lines.append(f"[{_BUY}] [{_PREVIOUS}] [{_BACK}]")
        else:
            lines += [
                f"[{row['product_id']}] {row['title']}, ${row['price']:.2f}"
                for row in self._listed()
            ]
            turns = {_PREVIOUS: self._page > 0, _NEXT: self._has_next()}
            lines += ["".join(f"[{name}] " for name, there in turns.items() if there) + "[search]"]
        text = "\n".join(lines)
        return Scene(text=text, score=0.0, is_done=False, is_refused=is_refused)

    def _has_next(self) -> bool:
        return (self._page + 1) * self._page_size < len(self._found)


def options_of(product: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the values of each option of a product, which may be JSON or a struct with NULLs."""
    options = product["options"]
    options = json.loads(options) if isinstance(options, str) else options or {}
    return {name: list(values) for name, values in options.items() if values}


@cache
def _indexed(products: str) -> TextIndex:
    rows = table_rows(json.loads(products), needs=_COLUMNS)
    texts = [{**row, "_text": f"{row['title']} {' '.join(row['attributes'])}"} for row in rows]
    return TextIndex(texts, key="product_id", text="_text")

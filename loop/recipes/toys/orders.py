"""Orders of a shop: their database, the tools and rules of its service, and what customers ask."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ....store import Task
from ....store.errors import JobError

_PEOPLE = ("Ada Holm", "Ben Ortiz", "Chloe Park", "Dan Weiss", "Emma Rossi", "Finn Adeyemi")
_GOODS = {"lamp": 40, "mug": 9, "chair": 120, "clock": 35, "kettle": 28, "blanket": 50}
_STREETS = ("Mill Road", "Station Street", "Harbor Lane", "Garden Way")


class Orders:
    """The service of a shop, a domain for `tool_agent_user`."""

    rules = (
        "You serve the customers of a shop with the tools. Look an order up before you change it. "
        "Only a pending order may be cancelled or sent elsewhere; of a shipped one, say that "
        "it is too late. Once a customer has all that they asked for, answer without a call."
    )

    def __init__(self, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.database: dict[str, dict[str, Any]] = {}
        for i in range(count):
            goods = [str(name) for name in rng.choice(list(_GOODS), 2, replace=False)]
            self.database[f"W{100 + i}"] = {
                "customer": str(rng.choice(_PEOPLE)),
                "status": str(rng.choice(["pending", "pending", "shipped"])),
                "items": {name: int(rng.integers(1, 4)) for name in goods},
                "address": f"{int(rng.integers(1, 90))} {rng.choice(_STREETS)}",
            }

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:
        """What the service can do."""
        return [self.find_orders, self.get_order, self.cancel_order, self.change_address]

    def find_orders(self, customer: str) -> list[str]:
        """List the orders of a customer.

        Args:
            customer: first and last name
        """
        return [i for i, order in self.database.items() if order["customer"] == customer]

    def get_order(self, order_id: str) -> dict[str, Any]:
        """Show an order, with its total in dollars."""
        order = self._order(order_id)
        return {**order, "total": sum(_GOODS[name] * n for name, n in order["items"].items())}

    def cancel_order(self, order_id: str) -> str:
        """Cancel a pending order."""
        self._pending(order_id)["status"] = "cancelled"
        return f"order {order_id} is cancelled"

    def change_address(self, order_id: str, address: str) -> str:
        """Send a pending order elsewhere."""
        self._pending(order_id)["address"] = address
        return f"order {order_id} goes to {address}"

    def _order(self, order_id: str) -> dict[str, Any]:
        if order_id not in self.database:
            raise JobError(f"no order `{order_id}`; `find_orders` lists those of a customer")
        return self.database[order_id]

    def _pending(self, order_id: str) -> dict[str, Any]:
        order = self._order(order_id)
        if order["status"] != "pending":
            raise JobError(f"order {order_id} is {order['status']}, expected a pending one")
        return order


def orders(*, count: int = 20, seed: int = 0) -> Orders:
    """Return a shop with `count` orders.

    >>> orders(count=1).get_order("W100")["status"]
    'pending'
    """
    return Orders(count, seed)


def order_requests(
    *, count: int = 20, held_out: int = 10, seed: int = 0, taskset: str = "orders"
) -> Iterator[Task]:
    """Yield three requests for each of the orders of `orders`, the first `held_out` for `eval`.

    A customer cancels, has it sent elsewhere, or asks for the total. What is too late needs no
    action and an answer with `too late`.

    >>> task = next(order_requests(count=1))
    >>> task.prompt_text
    'Please cancel my order W100.'
    >>> task.metadata["actions"]
    [{'name': 'cancel_order', 'arguments': {'order_id': 'W100'}}]
    """
    shop, rng = orders(count=count, seed=seed), np.random.default_rng(seed + 1)
    made = 0
    for order_id, order in shop.database.items():
        address = f"{int(rng.integers(1, 90))} {rng.choice(_STREETS)}"
        total = shop.get_order(order_id)["total"]
        is_late = order["status"] != "pending"
        one = {"order_id": order_id}
        for asked, name, arguments in (
            (f"Please cancel my order {order_id}.", "cancel_order", one),
            (
                f"Please send my order {order_id} to {address}.",
                "change_address",
                {**one, "address": address},
            ),
            (f"What is the total of my order {order_id}?", None, {}),
        ):
            outputs = [str(total)] if name is None else ["too late"] if is_late else []
            actions = [] if name is None or is_late else [{"name": name, "arguments": arguments}]
            about = {"persona": order["customer"], "goal": asked}
            yield Task.ask(
                asked,
                taskset=taskset,
                split="eval" if made < held_out else "train",
                metadata={**about, "actions": actions, "outputs": outputs},
            )
            made += 1

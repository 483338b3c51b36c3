"""The helpdesk of an internet provider, whose customers have a router that only they can touch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ....store import Task
from ....store.errors import JobError

_PEOPLE = ("Ada Holm", "Ben Ortiz", "Chloe Park", "Dan Weiss", "Emma Rossi", "Finn Adeyemi")
_FAULTS = ("unplugged", "hanging", "suspended", "broken")


class Helpdesk:
    """A domain for `tool_agent_user` in which the user has tools too."""

    rules = (
        "You serve the customers of an internet provider. Look a line up before all else. If it is "
        "suspended, say how many dollars are due, and do no more. If it hangs, reset it; then the "
        "customer must restart the router. Only customers can look at their router, plug in its "
        "cable and restart it: ask them to. Send a technician only if the line is active, and the "
        "lamp is red although the cable is in and the router was restarted."
    )

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.database: dict[str, Any] = {
            "lines": {
                name: {"status": "active", "due": int(rng.integers(11, 90)), "technician": False}
                for name in _PEOPLE
            },
            "router": {"cable": True, "works": True, "lamp": "red"},
        }
        self._customer = _PEOPLE[0]

    def begin(self, task: Task) -> None:
        """Bring about the fault in the task's metadata, `{customer, fault}` of `helpdesk`."""
        about = (task.metadata or {}).get("helpdesk") or {}
        fault, self._customer = about.get("fault"), self._line_of(str(about.get("customer")))
        if fault not in _FAULTS:
            raise JobError(f"the fault must be one of {', '.join(_FAULTS)}, got {fault!r}")
        line, router = self.database["lines"][self._customer], self.database["router"]
        if fault in ("hanging", "suspended"):
            line["status"] = fault
        router["cable"], router["works"] = fault != "unplugged", fault != "broken"

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:
        """What the helpdesk can do."""
        return [self.find_line, self.reset_line, self.send_technician]

    @property
    def user_tools(self) -> Sequence[Callable[..., Any]]:
        """What customers can do at home."""
        return [self.look_at_router, self.plug_in_cable, self.restart_router]

    def find_line(self, customer: str) -> dict[str, Any]:
        """Show the line of a customer.

        Args:
            customer: first and last name
        """
        return dict(self.database["lines"][self._line_of(customer)])

    def reset_line(self, customer: str) -> str:
        """Reset a line that hangs."""
        line = self.database["lines"][self._line_of(customer)]
        if line["status"] == "suspended":
            raise JobError(f"the line of {customer} is suspended, expected one that hangs")
        line["status"] = "active"
        return f"the line of {customer} is active"

    def send_technician(self, customer: str) -> str:
        """Send a technician to a customer."""
        self.database["lines"][self._line_of(customer)]["technician"] = True
        return f"a technician will come to {customer}"

    def look_at_router(self) -> str:
        """Look at your router."""
        router = self.database["router"]
        return f"The cable is {'in' if router['cable'] else 'out'}, the lamp is {router['lamp']}."

    def plug_in_cable(self) -> str:
        """Plug in the cable of your router."""
        self.database["router"]["cable"] = True
        return self.restart_router()

    def restart_router(self) -> str:
        """Restart your router."""
        router = self.database["router"]
        is_active = self.database["lines"][self._customer]["status"] == "active"
        is_online = router["cable"] and router["works"] and is_active
        router["lamp"] = "green" if is_online else "red"
        return self.look_at_router()

    def _line_of(self, customer: str) -> str:
        if customer not in self.database["lines"]:
            raise JobError(f"no customer `{customer}`; expected a first and a last name")
        return customer


def helpdesk(*, seed: int = 0) -> Helpdesk:
    """Return a helpdesk, whose customers owe amounts that depend on the seed.

    >>> helpdesk().find_line("Ada Holm")["status"]
    'active'
    """
    return Helpdesk(seed)


def outages(*, held_out: int = 8, seed: int = 0, taskset: str = "helpdesk") -> Iterator[Task]:
    """Yield a task for each customer and fault, in random order, the first `held_out` for `eval`.

    >>> faults = [task.metadata["helpdesk"]["fault"] for task in outages()]
    >>> len(faults), faults.count("hanging")
    (24, 6)
    """
    due = {name: line["due"] for name, line in helpdesk(seed=seed).database["lines"].items()}
    made = [(name, fault) for name in _PEOPLE for fault in _FAULTS]
    order = np.random.default_rng(seed).permutation(len(made))
    for i, (name, fault) in enumerate(made[k] for k in order):
        yield Task.ask(
            f"My internet does not work. My name is {name}.",
            taskset=taskset,
            split="eval" if i < held_out else "train",
            metadata={
                "helpdesk": {"customer": name, "fault": fault},
                "persona": f"{name}, who looks at the router and touches it only when asked to",
                "goal": "internet that works, or to know what has to happen first",
                "actions": _right_actions(name, fault),
                "outputs": [str(due[name])] if fault == "suspended" else [],
            },
        )


def _right_actions(customer: str, fault: str) -> list[dict[str, Any]]:
    one = {"customer": customer}
    return {
        "unplugged": [{"name": "plug_in_cable", "requestor": "user"}],
        "hanging": [
            {"name": "reset_line", "arguments": one},
            {"name": "restart_router", "requestor": "user"},
        ],
        "suspended": [],
        "broken": [{"name": "send_technician", "arguments": one}],
    }[fault]

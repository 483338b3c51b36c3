"""An agent serves customers with tools over a database, and is rewarded for what is left of it."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.rollouts import rollouts, script

from rlake.loop import cli
from rlake.loop.recipes.toys import order_requests, orders
from rlake.store import Experience, Task, connect

SERVED: dict[str, Any] = {"domain": "rlake.loop.recipes.toys:orders", "max_turns": 6}
CANCEL, MOVE, TOTAL = list(order_requests())[:3]
LATE = next(t for t in order_requests() if "too late" in (t.metadata or {})["outputs"])


def call(name: str, **arguments: Any) -> str:
    made = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{made}\n</tool_call>"


def served(task: Task, *said: str, user: Any = None, **changes: Any) -> Experience:
    """The last row of a rollout."""
    models: Mapping[str, Any] = {} if user is None else {"models": {"user": user}}
    return rollouts(script(*said)[0], {"tool_agent_user": SERVED | changes}, task, **models)[-1]


def parts(row: Experience) -> tuple[float, float, float, float | None]:
    measured = [row.metrics[name] for name in ("goal/database", "goal/said", "user/done")]
    return measured[0], measured[1], measured[2], row.reward


def test_the_right_change_is_rewarded_and_another_or_one_more_is_not() -> None:
    right, done = call("cancel_order", order_id="W100"), "It is cancelled."
    row = served(CANCEL, call("get_order", order_id="W100"), right, done)
    assert parts(row) == (1.0, 1.0, 1.0, 1.0)
    assert row.messages is not None
    assert row.messages[0]["content"] == orders().rules
    assert parts(served(CANCEL, "It is cancelled.")) == (0.0, 1.0, 1.0, 0.0)
    more = call("change_address", order_id="W100", address="1 Mill Road")
    assert parts(served(CANCEL, more, right, done)) == (0.0, 1.0, 1.0, 0.0)


def test_what_the_user_must_be_told_is_looked_for_in_answers_alone() -> None:
    [total] = (TOTAL.metadata or {})["outputs"]
    look = call("get_order", order_id="W100")
    assert parts(served(TOTAL, look, f"It is ${int(total):,}.00.")) == (1.0, 1.0, 1.0, 1.0)
    assert parts(served(TOTAL, look, "I have told you.")) == (1.0, 0.0, 1.0, 0.0)


def test_a_rule_that_the_tools_enforce_is_told_to_the_policy() -> None:
    order_id = str(LATE.prompt_text).split("order ")[1].split()[0].rstrip(".")
    row = served(LATE, call("cancel_order", order_id=order_id), "Sorry, it is too late.")
    assert parts(row) == (1.0, 1.0, 1.0, 1.0)
    [result] = [m["content"] for m in row.messages or () if m["role"] == "tool"]
    assert result == f"Error: order {order_id} is shipped, expected a pending one"
    assert row.metrics["tools/errors"] == 1.0


def test_a_simulated_user_hears_answers_without_calls_and_ends_the_conversation() -> None:
    user, heard = script("To 3 Garden Way, I said.", "Thanks. [DONE]")
    address = (MOVE.metadata or {})["actions"][0]["arguments"]["address"]
    move = call("change_address", order_id="W100", address=address)
    row = served(MOVE, "Where to?", move, "Done.", user=user)
    assert parts(row) == (1.0, 1.0, 1.0, 1.0)
    assert [m["content"] for m in heard[1]][2:] == [
        MOVE.prompt_text,
        "Where to?",
        "To 3 Garden Way, I said.",
        "Done.",
    ]
    assert str((MOVE.metadata or {})["persona"]) in heard[0][0]["content"]


class Library:
    """A domain whose tool is a coroutine function."""

    rules = "Lend."

    def __init__(self) -> None:
        self.database = {"lent": False}

    @property
    def tools(self) -> list[Any]:
        return [self.lend]

    async def lend(self) -> str:
        """Lend the book."""
        self.database["lent"] = True
        return "lent"


@pytest.mark.parametrize("arguments", [{}, "{}"])
def test_right_actions_may_be_of_tools_that_are_awaited(arguments: Any) -> None:
    about = {"actions": [{"name": "lend", "arguments": arguments}]}
    task, domain = Task.ask("Lend it.", None, metadata=about), f"{__name__}:Library"
    assert served(task, call("lend"), "Done.", domain=domain).reward == 1.0
    assert served(task, "Done.", domain=domain).reward == 0.0


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"outputs": "42"}, "`outputs` of task .* must be a list of texts"),
        ({"actions": ["lend"]}, "`actions` of task .* must be a list of calls"),
    ],
)
def test_metadata_of_another_shape_is_named(about: dict[str, Any], said: str) -> None:
    row = served(Task.ask("Lend it.", None, metadata=about), "4 and 2")
    assert re.search(said, str(row.drop_reason))


def test_a_conversation_without_an_end_is_cut() -> None:
    look = call("get_order", order_id="W100")
    row = served(CANCEL, look, look, max_turns=2)
    assert (row.finish_reason, row.reward, row.metrics["tools/calls"]) == ("max_turns", 0.0, 2.0)
    user, _ = script(*["And?"] * 3)
    row = served(CANCEL, "Yes?", "Yes?", user=user, max_turns=2)
    assert (row.finish_reason, row.metrics["user/done"]) == ("max_turns", 0.0)


def with_actions(*actions: dict[str, Any]) -> Task:
    return replace(CANCEL, metadata={"actions": list(actions)})


def half_a_domain() -> object:
    return SimpleNamespace(rules="?", database={})


@pytest.mark.parametrize(
    ("task", "domain", "said"),
    [
        (with_actions({"name": "cancel_orders"}), None, "no tool; did you mean `cancel_order`"),
        (with_actions({"name": "get_order", "arguments": {"id": 1}}), None, "`get_order` of the"),
        (CANCEL, "nowhere", "no domain `nowhere`"),
        (CANCEL, "test_tool_agent_user:half_a_domain", "has no `tools`; expected an object with"),
    ],
)
def test_a_task_or_a_domain_that_does_not_fit_is_named(
    task: Task, domain: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "test_tool_agent_user", sys.modules[__name__])
    row = served(task, "?", **({"domain": domain} if domain else {}))
    assert said in str(row.drop_reason)


def test_each_task_of_the_shop_is_solved_by_its_actions_and_outputs() -> None:
    for task in order_requests(count=8, held_out=3):
        about = task.metadata or {}
        calls = [call(action["name"], **action["arguments"]) for action in about["actions"]]
        shop = {"rlake.loop.recipes.toys:orders": {"count": 8}}
        assert served(task, *calls, f"So: {about['outputs']}", domain=shop).reward == 1.0


@pytest.mark.slow
def test_the_recipe_runs_on_the_engine_and_counts_reliability(tmp_path: Path) -> None:
    store = connect(tmp_path / "lake")
    short = [
        "trainer.steps=1",
        "trainer.batch_size=1",
        "explorer.sampling.max_tokens=8",
        "evaluate.sampling.max_tokens=4",
        "evaluate.every_steps=1",
        "evaluate.at_start=false",
    ]
    words = [word for text in short for word in ("--set", text)]
    assert cli.run_command(["run", "orders", "--store", store.uri, *words]) == 0
    counted = "SELECT count(*), max(tools::VARCHAR LIKE '%cancel_order%') FROM experiences"
    trained = store.sql(f"{counted} WHERE purpose = 'train'").fetchall()
    assert trained == [(8, True)]
    reliable = """
        SELECT count(*), avg(pass_hat_k(n, c, 4)) FROM (
            SELECT count(*) AS n, sum(reward)::INT AS c FROM experiences
            WHERE purpose = 'eval' GROUP BY task_id)"""
    assert store.sql(reliable).fetchall() == [(10, 0.0)]

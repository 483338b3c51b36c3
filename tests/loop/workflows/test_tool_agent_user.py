"""An agent serves customers with tools over a database, and is rewarded for what is left of it."""

import asyncio
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.rollouts import rollouts, run_tasks, script, spec_of
from support.scripted_models import parrot
from support.serving import listening

from rlake.loop import cli
from rlake.loop.chat_api.app import create_app
from rlake.loop.config import Endpoint
from rlake.loop.inference.endpoint.policy import EndpointPolicy
from rlake.loop.recipes.toys import order_requests, orders, outages
from rlake.store import Experience, Store, Task, connect

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


OUTAGES = {str((task.metadata or {})["helpdesk"]["fault"]): task for task in outages()}
"""A task of each fault."""
HELPDESK = {"domain": "rlake.loop.recipes.toys:helpdesk", "max_turns": 8}


def customer(task: Task) -> str:
    return str((task.metadata or {})["helpdesk"]["customer"])


def helped(fault: str, *said: str, user: Any) -> Experience:
    return served(OUTAGES[fault], *said, user=user, **HELPDESK)


def test_only_the_user_can_call_the_tools_of_the_user_and_only_they_see_the_results() -> None:
    look, plug = call("look_at_router"), call("plug_in_cable")
    user, heard = script(look, "The lamp is red.", look + plug, "It works! [DONE]")
    row = helped("unplugged", "What does the router show?", "Is the cable in?", user=user)
    assert parts(row) == (1.0, 1.0, 1.0, 1.0)
    assert (row.metrics["user/calls"], "tools/calls" in row.metrics) == (3.0, False)
    seen = [(m["role"], m["content"]) for m in heard[-1][2:]]
    assert seen == [
        ("assistant", OUTAGES["unplugged"].prompt_text),
        ("user", "What does the router show?"),
        ("assistant", ""),
        ("tool", "The cable is out, the lamp is red."),
        ("assistant", "The lamp is red."),
        ("user", "Is the cable in?"),
        ("assistant", ""),
        ("tool", "The cable is out, the lamp is red."),
        ("tool", "The cable is in, the lamp is green."),
    ]
    assert [m["role"] for m in row.messages or ()] == ["system", *["user", "assistant"] * 2]
    offered = [one["function"]["name"] for one in row.tools or ()]
    assert offered == ["find_line", "reset_line", "send_technician"]
    row = helped("unplugged", plug, "Done.", user=script("[DONE]")[0])
    assert (row.reward, row.metrics["tools/unknown"]) == (0.0, 1.0)


def test_the_order_in_which_agent_and_user_act_decides() -> None:
    reset = call("reset_line", customer=customer(OUTAGES["hanging"]))
    restart = call("restart_router")
    row = helped("hanging", reset, "Restart it.", user=script(restart, "Thanks. [DONE]")[0])
    assert parts(row) == (1.0, 1.0, 1.0, 1.0)
    early = script(restart, "I did.", "[DONE]")[0]
    row = helped("hanging", "Restart it.", reset, "It is reset.", user=early)
    assert parts(row) == (0.0, 1.0, 1.0, 0.0)


def test_a_rule_that_no_tool_enforces_is_broken_at_the_cost_of_the_reward() -> None:
    send = call("send_technician", customer=customer(OUTAGES["broken"]))
    bye = "Thanks. [DONE]"
    assert helped("broken", send, "One comes.", user=script(bye)[0]).reward == 1.0
    send = call("send_technician", customer=customer(OUTAGES["unplugged"]))
    user = script(call("plug_in_cable"), bye)[0]
    row = helped("unplugged", send, "Plug it in.", user=user)
    assert parts(row) == (0.0, 1.0, 1.0, 0.0)
    [due] = (OUTAGES["suspended"].metadata or {})["outputs"]
    assert helped("suspended", f"${due} are due.", user=script(bye)[0]).reward == 1.0
    row = helped("suspended", "It is suspended.", user=script(bye)[0])
    assert parts(row) == (1.0, 0.0, 1.0, 0.0)


def test_each_task_of_the_helpdesk_is_solved_by_its_actions_and_outputs() -> None:
    for task in outages():
        about = task.metadata or {}
        by: dict[str, list[str]] = {"assistant": [], "user": []}
        for action in about["actions"]:
            who = action.get("requestor", "assistant")
            by[who].append(call(action["name"], **action.get("arguments", {})))
        user = script(*by["user"], "[DONE]")[0]
        row = served(task, *by["assistant"], f"So: {about['outputs']}", user=user, **HELPDESK)
        assert row.reward == 1.0
        assert row.reward > served(task, "Hm.", user=script("[DONE]")[0], **HELPDESK).reward  # type: ignore[operator]


def test_a_user_behind_an_endpoint_calls_tools() -> None:
    user = parrot(call("plug_in_cable"), "It works! [DONE]")
    spec = spec_of({"tool_agent_user": HELPDESK}, models={"user"})

    async def asked() -> Experience:
        async with listening(create_app(user)) as address:
            settings = Endpoint(url=f"{address}/v1", model="user", max_retries=0)
            there = EndpointPolicy(settings)
            agent, _ = script("Plug the cable in.")
            work = [(0, OUTAGES["unplugged"])]
            rows = await run_tasks(work, agent, replace(spec, models={"user": there}), batch=1)
            there.close()
            return rows[-1]

    row = asyncio.run(asked())
    assert (row.reward, row.metrics["user/calls"]) == (1.0, 1.0)


def test_a_user_who_only_calls_tools_fails_the_rollout() -> None:
    user, heard = script(*[call("look_at_router")] * 20)
    row = helped("unplugged", "Hello?", user=user)
    assert "the simulated user: called tools 8 times in a row" in str(row.drop_reason)
    assert (row.reward, len(heard)) == (None, 8)


class Notes:
    """A domain whose database takes what the task has."""

    rules = "Write."

    def begin(self, task: Task) -> None:
        self.database = {"notes": (task.metadata or {})["notes"]}

    @property
    def tools(self) -> list[Any]:
        return [self.write]

    def write(self, text: str) -> str:
        """Write a note."""
        self.database["notes"].append(text)
        return "written"


def test_what_a_task_brings_into_the_database_stays_that_of_one_rollout() -> None:
    right = {"actions": [{"name": "write", "arguments": {"text": "two"}}]}
    task = Task.ask("Write two.", None, metadata={"notes": ["one"], **right})
    domain = f"{__name__}:Notes"
    assert served(task, call("write", text="two"), "Done.", domain=domain).reward == 1.0
    assert served(task, "Done.", domain=domain).reward == 0.0
    assert (task.metadata or {})["notes"] == ["one"]


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


def of_helpdesk(**changes: Any) -> Task:
    return replace(OUTAGES["broken"], metadata={**(OUTAGES["broken"].metadata or {}), **changes})


PLUG = {"name": "plug_in_cable"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"actions": [PLUG]}, "calls `plug_in_cable`, no tool"),
        (
            {"actions": [PLUG | {"requestor": "agent"}]},
            "must be `assistant` or `user`, got 'agent'",
        ),
        (
            {"actions": [{"name": "plug_in_cabel", "requestor": "user"}]},
            "no tool of the user; did you mean `plug_in_cable`",
        ),
        ({"helpdesk": {"customer": "Ada Holm", "fault": "rain"}}, "must be one of unplugged"),
        ({"helpdesk": None}, "no customer `None`"),
    ],
)
def test_a_task_that_does_not_fit_a_domain_with_tools_of_the_user_is_named(
    changes: dict[str, Any], said: str
) -> None:
    row = served(of_helpdesk(**changes), "?", user=script("[DONE]")[0], **HELPDESK)
    assert said in str(row.drop_reason)
    assert row.reward is None


def test_users_with_tools_need_a_model_that_plays_them() -> None:
    row = served(OUTAGES["broken"], "?", **HELPDESK)
    assert "name the model that plays them in `explorer.auxiliary_models.user`" in str(
        row.drop_reason
    )


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


DOWN = "explorer.auxiliary_models.user={endpoint: {url: 'http://127.0.0.1:9/v1', model: m}}"
TINY = ["trainer.steps=1", "trainer.batch_size=1", "explorer.sampling.max_tokens=4"]
TINY += ["evaluate.every_steps=null", "algorithm={grpo: {group_size: 2}}"]


def run_helpdesk(store: Store, *settings: str) -> int:
    words = [word for text in (*TINY, *settings) for word in ("--set", text)]
    return cli.run_command(["run", "helpdesk", "--store", store.uri, *words])


def test_a_run_whose_users_do_not_answer_ends_and_names_them(
    store: Store, capfd: pytest.CaptureFixture[str]
) -> None:
    once = "explorer.auxiliary_models.user.endpoint.max_retries=0"
    assert run_helpdesk(store, DOWN, once) == 1
    assert "the simulated user: `http://127.0.0.1:9/v1`" in capfd.readouterr().err
    failed = "SELECT count(*), count(reward), any_value(finish_reason) FROM experiences"
    [(rows, rewards, reason)] = store.sql(failed).fetchall()
    assert (rows > 0, rewards, reason) == (True, 0, "engine_error")


def test_agent_and_user_of_the_helpdesk_are_played_by_two_engines(store: Store) -> None:
    assert run_helpdesk(store, "explorer.workflow.tool_agent_user.max_turns=2") == 0
    found = """SELECT count(*), min(reward), max(tools::VARCHAR LIKE '%reset_line%'),
        max(tools::VARCHAR LIKE '%plug_in_cable%') FROM experiences WHERE drop_reason IS NULL"""
    assert store.sql(found).fetchall() == [(2, 0.0, True, False)]
    [(said,)] = store.sql("SELECT max(len(messages::JSON[])) FROM experiences").fetchall()
    assert said >= 5  # rules, the task's message, an answer, what the user says to it, an answer


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

"""Agents that are programs: their calls are the rows that a step trains on."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.rollouts import rollouts
from support.scripted_models import parrot, spoken

from rlake.loop import cli
from rlake.loop.rollouts.group import workflow_of
from rlake.loop.trajectories.rewards import RewardPart
from rlake.store import Experience, Task, connect
from rlake.store.errors import ConfigError

TASK = Task.ask("2+3=", "5")
OTHER = Path(sys.prefix) / "agentscope" / "bin" / "python"
PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
ASKING = """
import json, os, sys, urllib.request
env = os.environ
said = [{"role": "user", "content": sys.stdin.read()}]
asked = json.dumps({"model": env["OPENAI_MODEL"], "messages": said}).encode()
heads = {"content-type": "application/json", "authorization": f"Bearer {env['OPENAI_API_KEY']}"}
request = urllib.request.Request(f"{env['OPENAI_BASE_URL']}/chat/completions", asked, heads)
answer = json.load(urllib.request.urlopen(request))
print(answer["choices"][0]["message"]["content"] + env["MORE"])
"""


def right(task: Task, experience: Experience) -> float:
    return float(experience.response_text == task.answer)


def tried(*command: str, **parameters: Any) -> Experience:
    given = {"command": list(command), **parameters}
    rewards = {"right": RewardPart(right)}
    [row] = rollouts(parrot("5"), {"agent_program": given}, TASK, rewards=rewards)
    return row


def test_what_a_program_asks_is_a_row_and_what_it_prints_is_judged() -> None:
    row = tried("python", "-c", ASKING, environment={"MORE": "0"})
    assert (row.response_text, row.reward, row.num_turns) == ("50", 0.0, 1)
    assert spoken(row, parrot("5"))[1] == ["5<eos>"]


@pytest.mark.parametrize("own_session", ["False", "True"])
def test_what_a_program_leaves_running_is_not_waited_for(own_session: str) -> None:
    left = f"""
import subprocess
waits = [sys.executable, "-c", "import time; time.sleep(90)"]
subprocess.Popen(waits, start_new_session={own_session})
"""
    started = time.monotonic()
    row = tried("python", "-c", ASKING + left, environment={"MORE": "0"})
    assert row.response_text == "50"
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("raise SystemExit('no model today')", "ended with status 1: no model today"),
        ("while True: print('y' * 9999)", "prints more than 1 MB"),
        ("pass", "asked nothing of the policy"),
        ("print('y' * 4_000_000, flush=True); input()", "prints more than 1 MB"),
    ],
)
def test_a_program_that_fails_is_a_row_with_its_reason(program: str, told: str) -> None:
    assert told in str(tried("python", "-c", program).drop_reason)


@pytest.mark.parametrize(
    ("command", "told"), [([], "`command` is empty"), (["nowhere"], "no program `nowhere`")]
)
def test_a_program_that_is_not_there_is_refused_before_work(command: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        workflow_of({"agent_program": {"command": command}})


def has(package: str) -> bool:
    finds = f"import importlib.util as u; raise SystemExit(u.find_spec('{package}') is None)"
    return OTHER.exists() and not subprocess.run([OTHER, "-c", finds]).returncode


def on_the_page(name: str) -> str:
    found = re.search(rf"^```python\n(# file: {name}\n.*?)^```", PAGE.read_text(), re.M | re.S)
    assert found, name
    return found[1]


@pytest.mark.slow
@pytest.mark.parametrize(("package", "calls"), [("langgraph", 2), ("agentscope", 1)])
def test_grpo_trains_a_frameworks_agent_by_its_calls(
    package: str, calls: int, tmp_path: Path
) -> None:
    if not has(package):
        pytest.skip(f"needs {package}; `make .venv/.agentscope`")
    program = tmp_path / f"{package}_agent.py"
    program.write_text(on_the_page(program.name))
    store = connect(tmp_path / "lake")
    workflow = {"agent_program": {"command": [str(OTHER), str(program)]}}
    settings = [
        f"explorer.workflow={json.dumps(workflow)}",
        "algorithm={grpo: {group_size: 2}}",
        "explorer.rewards=support.environments:varied",
        "trainer.steps=1",
        "trainer.batch_size=1",
    ]
    words = [word for text in settings for word in ("--set", text)]
    assert cli.run_command(["run", "langgraph", "--store", store.uri, *words]) == 0
    rows = store.sql("SELECT count(DISTINCT rollout_index), sum(num_turns) FROM experiences")
    [(rollouts_made, turns)] = rows.fetchall()
    assert rollouts_made == 2
    assert turns >= 2 * calls  # a random model gives no sequence: LangGraph's asks again
    drawn = "SELECT count(*) FROM draws ANTI JOIN experiences USING (experience_id)"
    assert store.sql(drawn).fetchall() == [(0,)]
    assert store.sql("SELECT count(DISTINCT digest) FROM policies").fetchall() == [(2,)]


SORTER = "rlake.loop.recipes.toys.agentscope_agent"


def test_a_missing_environment_of_agentscope_is_named_with_its_installation() -> None:
    row = tried("python", "-m", SORTER, environment={"AGENTSCOPE_PYTHON": "no/bin/python"})
    told = str(row.drop_reason)
    assert "`no/bin/python` has no agentscope; install it with `python -m venv" in told
    # one that has no agentscope either is not started again and again
    row = tried("python", "-m", SORTER, environment={"AGENTSCOPE_PYTHON": sys.executable})
    assert "has no agentscope; install it" in str(row.drop_reason)


@pytest.mark.slow
def test_the_recipe_of_agentscope_trains_on_the_calls_of_its_agent(tmp_path: Path) -> None:
    if not has("agentscope"):
        pytest.skip("needs agentscope; `make .venv/.agentscope`")
    store = connect(tmp_path / "lake")
    program = "explorer.workflow.agent_program"
    settings = [
        f"{program}.environment={{AGENTSCOPE_PYTHON: {OTHER}}}",
        "algorithm={grpo: {group_size: 2}}",
        "trainer.steps=1",
        "trainer.batch_size=1",
    ]
    words = [word for text in settings for word in ("--set", text)]
    assert cli.run_command(["run", "agentscope", "--store", store.uri, *words]) == 0
    [(rows, drops, turns)] = store.sql(
        "SELECT count(*), count(drop_reason), max(num_turns) FROM experiences"
    ).fetchall()
    assert (rows, drops, turns) == (2, 0, 1)
    asked = store.sql("SELECT DISTINCT messages::JSON->0->>'role' FROM experiences").fetchall()
    assert asked == [("system",)]

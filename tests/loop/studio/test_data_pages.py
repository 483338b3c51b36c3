"""The pages about a run's history and the store's data, in a real browser."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from urllib.parse import quote, urlencode

import pytest
from support.browser import browser
from support.shown import ERRORS, SETTLED, Shown
from support.studio import HOSTILE, HOUR, hostile_rollouts, is_at_rest, rests, studio

import rlake
from rlake.loop.audits import bias, drop, off_policy, value
from rlake.pipelines import Pipeline, Table
from rlake.pipelines.expectations import Expectation, check
from rlake.pipelines.reward_diff import compare
from rlake.store.lineage.policy import of_policy

pytestmark = pytest.mark.slow
RUN = "grpo_digits"
FIELD = ".card .q-field input"


@pytest.fixture(scope="module")
def shown(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """Show a copy of the run's store, with what the pages are about; they may write."""
    folder = tmp_path_factory.mktemp("data")
    copytree(finished_run, folder / "lake")
    store = rlake.connect(folder / "lake")
    passing = Expectation(range={"reward": (2, None)}, name=f"much {HOSTILE}")
    check(store, [passing], HOSTILE, select="SELECT * FROM experiences", run_id=RUN)
    hostile_rollouts(store)
    job = {"run_id": HOSTILE, "name": HOSTILE, "attempt": 1, "job": "train", "status": "done"}
    store.append("job_events", [job | {"config": "{}", "code_version": "0", "start_step": 1}])
    keep = {"keep": {"where": "reward > 0.2"}}
    rows = Table("experiences", where="reward IS NOT NULL")
    Pipeline(HOSTILE, rows, [keep, {"pairs": {}}], Table("preferences")).run(store)
    scored = store.sql(f"SELECT experience_id FROM draws WHERE run_id = '{RUN}'").fetchall()
    strict = {"scorer": "strict", "scorer_version": "1", "value": 0.125}
    store.append("scores", [strict | {"experience_id": one} for (one,) in scored])
    store.snapshot("first", note=HOSTILE)
    store.branch("other").append("tasks", [rlake.Task.ask("2+2=", "4")])
    with studio(folder / "lake", "--write") as url, browser(folder / "profile") as page:
        yield Shown(store, url, page)


def opened(shown: Shown, address: str, *texts: str) -> None:
    """Open a page and see the texts on it, no error, and nothing that ran as a script."""
    shown.go(address)
    for one in texts:
        shown.page.wait(f"document.querySelector('main').innerText.includes({json.dumps(one)})")
    assert shown.mistakes() == []
    assert shown.page.value("window.hacked") is None
    assert shown.page.value("document.querySelectorAll('main img').length") == 0


def click(shown: Shown, which: str, text: str) -> None:
    """Click on the element that has this text."""
    found = f"[...document.querySelectorAll('{which}')].find(e => e.innerText.includes('{text}'))"
    shown.page.wait(found)
    shown.page.value(f"{found}.click()")


def test_audits_are_sentences(shown: Shown) -> None:
    found = bias(shown.store, RUN)
    opened(shown, f"/audits?run={RUN}", *found.facts, f"much {HOSTILE}", "within chance")
    assert shown.page.value(ERRORS) == ""
    first, second = drop(shown.store, RUN, (2, 3), (1, 1)).reward_mean
    rule = quote("finish_reason = 'stop'")
    address = f"/audits?run={RUN}&steps=2:3&against=1&weight={rule}"
    facts = value(shown.store, RUN).facts
    opened(shown, address, f"Mean reward {first:.4f} → {second:.4f}", "left out: 0 rows", *facts)
    assert shown.page.value(ERRORS) == ""
    chosen = {"where": "rollout_index = 0", "reward": "score:strict@1"}
    logged = off_policy(shown.store, RUN, weight="finish_reason = 'stop'", **chosen)
    told = f"{logged.num_rows} rows of {logged.num_tasks} tasks", "0.125", "`nobody`"
    opened(shown, f"{address}&{urlencode(chosen)}&runs=nobody", *told)


def test_an_audit_that_cannot_answer_says_why_and_the_others_answer(shown: Shown) -> None:
    address = f"/audits?run={RUN}&steps=9:1&against=1&weight={quote('rewrd > 0')}"
    opened(shown, address, "must be two steps", "names a column `rewrd`", "differ from")
    opened(shown, f"/audits?run={quote(HOSTILE)}", "has trained no step")


ENDLESS = f"/audits?{urlencode({'run': RUN, 'weight': 'reward', 'where': f'({HOUR}) > 0'})}"
"""The audits of a run, of which one takes hours."""


def test_cancel_ends_an_audit_and_its_place_says_so(shown: Shown) -> None:
    asking = "document.querySelectorAll('main .waiting').length === 1"
    shown.page.go(shown.url + ENDLESS)
    shown.page.wait(f"document.querySelector('main').innerText.includes('Mean reward') && {asking}")
    assert not is_at_rest(shown.url.process)
    click(shown, ".waiting button", "Cancel")
    shown.page.wait("document.querySelector('main [role=status]')")
    said = shown.page.value("document.querySelector('main [role=status]').innerText")
    assert re.fullmatch(r"Cancelled after \d+ s\.", said)
    assert shown.page.value(SETTLED)
    assert rests(shown.url.process), "its query goes on"
    assert (shown.page.value(ERRORS), shown.mistakes()) == ("", [])
    opened(shown, f"/audits?run={RUN}&weight=reward", "worth")


def test_a_browser_that_goes_away_ends_its_question(shown: Shown) -> None:
    shown.page.go(shown.url + ENDLESS)
    shown.page.wait("document.querySelectorAll('main .waiting').length === 1")
    assert not is_at_rest(shown.url.process)
    shown.page.go("about:blank")
    assert rests(shown.url.process), "its query goes on"


def test_a_policy_leads_to_its_rows_and_a_rollout_to_its_policies(shown: Shown) -> None:
    lineage = of_policy(shown.store, RUN, 3)
    rows = f"{lineage.rows['num_experiences']} rollouts"
    opened(shown, f"/lineage?run={RUN}", "version 3", "reward:share_right", rows, f"{RUN}.tasks")
    assert shown.page.value(ERRORS) == ""
    click(shown, ".box", rows)
    shown.page.wait("location.pathname === '/rollouts'")
    assert "step+%3C%3D+3" in shown.page.value("location.search")
    [(one,)] = shown.store.sql(
        f"SELECT min(experience_id) FROM draws WHERE run_id = '{RUN}' AND step = 2"
    ).fetchall()
    opened(shown, f"/lineage?experience={quote(one)}", "drawn in step 2", "versions 2 to 3")
    opened(shown, f"/lineage?experience={quote('x0' + HOSTILE)}", "x0<img", "reward 0.5")
    opened(shown, f"/lineage?run={RUN}&version=9", "the nearest are `3`, `2`, `1`")


def test_a_pipeline_run_shows_its_operators_and_what_they_dropped(shown: Shown) -> None:
    [(key, dropped)] = shown.store.sql(
        "SELECT any_value(lineage_id), count(*) FROM drops WHERE operator = 'keep'"
    ).fetchall()
    lost = (f"{dropped} dropped", "not true: reward > 0.2", "Pairs that it made", HOSTILE[:40])
    opened(shown, f"/pipelines?id={key}", *lost)
    assert shown.page.value(ERRORS) == ""
    opened(shown, "/pipelines?id=nothing", "no pipeline run `nothing`")


def test_an_operator_is_tried_on_rows_and_nothing_is_written(shown: Shown) -> None:
    versions = shown.store.versions()
    query = quote(f"SELECT * FROM experiences WHERE run_id = '{RUN}'")
    opened(shown, f"/pipelines?q={query}&params={quote('where: reward > 0.2')}", "Try an operator")
    click(shown, "button", "Preview")
    rows = shown.store.sql(
        f"SELECT count(*) FILTER (reward > 0.2) FROM (SELECT * FROM experiences "
        f"WHERE run_id = '{RUN}' LIMIT 100)"
    ).fetchall()[0][0]
    said = f"{rows} out, {96 - rows} dropped"
    shown.page.wait(f"document.querySelector('main').innerText.includes('{said}')")
    assert "where: reward > 0.2" in shown.text(), "the YAML to copy"
    opened(shown, f"/pipelines?params={quote('wher: x')}", "Try an operator")
    click(shown, "button", "Preview")
    shown.page.wait("document.querySelector('main .error')?.innerText.includes('wher')")
    assert shown.mistakes() == []
    assert shown.store.versions() == versions


def test_a_configuration_is_checked_while_it_is_typed(shown: Shown) -> None:
    page = shown.page
    opened(shown, "/new?recipe=grpo_digits", "Valid", "a step trains on 16 groups", "KV cache")
    assert page.value(ERRORS) == ""
    page.value(f"document.querySelectorAll('{FIELD}')[3].focus()")
    page.press("7")
    page.wait("document.querySelector('.cm-content').innerText.includes('steps: 7')")
    page.wait("document.querySelector('main').innerText.includes('7 steps draw 112 groups')")
    page.value(f"document.querySelectorAll('{FIELD}')[2].focus()")
    page.press("dpoo")
    page.wait("document.querySelector('main .error')?.innerText.includes('did you mean `dpo`')")
    disabled = "[...document.querySelectorAll('button')].find(b => b.innerText == 'Start').disabled"
    assert page.value(disabled)
    opened(
        shown,
        f"/new?yaml={quote('{extends: grpo_digits, trainr: {}}')}",
        "unknown key `trainr`",
        "`trainer`",
    )
    opened(shown, f"/new?yaml={quote('[' + HOSTILE)}", "the configuration")


def test_rewards_are_compared_and_a_curriculum_is_shown(shown: Shown) -> None:
    found = compare(shown.store, "reward", "score:strict@1").rows
    changed = f"changed\n{found['changed']}"
    opened(shown, "/rewards", "score:strict@1 is b", changed, "Rows that change most")
    assert shown.page.value(ERRORS) == ""
    opened(shown, "/rewards?b=score:strct@1", "score:strct@1")
    assert "strct" in shown.page.value(ERRORS)
    tasks = f"SELECT DISTINCT task_id FROM task_selections WHERE run_id = '{RUN}'"
    number = len(shown.store.sql(tasks).fetchall())
    opened(shown, f"/curriculum?run={RUN}", f"{number} tasks", "Different tasks in a batch")
    opened(shown, f"/curriculum?run={quote(HOSTILE)}", "has chosen no task")


def test_people_label_a_queue_that_the_address_names(shown: Shown) -> None:
    opened(shown, "/label", "No label is stored yet", "People for each")
    address = f"/label?queue={quote(HOSTILE)}&labels=1..3&pairs=true&annotator=ann"
    opened(shown, address, "Which answer is better?", "first", "0 by you")
    click(shown, "button", "tie")
    shown.page.wait("document.querySelector('main').innerText.includes('1 by you')")
    cell = ".ag-center-cols-container .ag-row .ag-cell"
    opened(shown, "/label", HOSTILE[:40])
    click(shown, cell, "<img src=x")
    shown.page.wait(f"location.search.includes('pairs=true') && {SETTLED}")
    opened(shown, "/label?queue=digits&labels=0..4&annotator=bob", "0 by you")
    shown.page.press("1")
    shown.page.wait("document.querySelector('main').innerText.includes('1 by you')")
    shown.page.value("document.querySelector('main input').focus()")
    shown.page.press("by")
    shown.page.value("document.querySelector('main input').blur()")
    shown.page.wait("localStorage.getItem('rlake-annotator')")
    opened(shown, "/label", "digits")
    click(shown, cell, "digits")
    shown.page.wait(f"location.search.includes('labels=') && {SETTLED}")
    shown.page.wait("document.querySelector('main input').value.includes('by')")
    assert "annotator" not in shown.page.value("location.search")
    assert shown.page.value(ERRORS) == ""
    digits = "SELECT annotator, label, score FROM labels WHERE queue = 'digits'"
    assert shown.store.sql(digits).fetchall() == [("bob", "1", 1.0)]
    opened(shown, "/label?queue=q&choose=randm", "did you mean `random`?")
    opened(shown, "/label?queue=q&labels=one", "2 to 20 different")
    found = "SELECT annotator, label, score FROM labels WHERE compared_id IS NOT NULL"
    assert shown.store.sql(found).fetchall() == [("ann", "tie", 0.5)]


def test_a_snapshot_is_compared_and_restored_after_a_confirmation(shown: Shown) -> None:
    opened(shown, "/snapshots?first=first", HOSTILE, "branch, 1 row added", "tasks +1")
    opened(shown, "/snapshots?first=frist", "no snapshot `frist`", "`first`")
    before = shown.store.count("tasks")
    shown.store.append("tasks", [rlake.Task.ask("3+3=", "6")])
    opened(shown, "/snapshots?first=first", "What changed")
    click(shown, "button", "Restore")
    shown.page.wait("document.querySelector('.q-dialog .title')")
    assert "tasks: 1 row removed" in shown.page.value(
        "document.querySelector('.q-dialog').innerText"
    )
    assert shown.store.count("tasks") == before + 1
    click(shown, ".q-dialog button", "Restore")
    shown.page.wait("location.search.includes('before-restore')")
    shown.page.wait(SETTLED)
    assert rlake.connect(shown.store.uri).count("tasks") == before

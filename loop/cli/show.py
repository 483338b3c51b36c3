"""The command `show`: everything that the store knows of one id."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import ROWS, AtOption, JsonOption, StoreOption, app, open_store
from .lazy import heavy
from .tables import print_fields, print_heading, print_json, print_rows
from .token_colors import print_tokens, print_turns

if TYPE_CHECKING:
    from ...store import Store

Found = dict[str, Any]

KINDS = {
    "experience": ("experiences", "experience_id"),
    "group": ("experiences", "group_id"),
    "run": ("runs", "run_id"),
    "task": ("tasks", "task_id"),
    "preference": ("preferences", "preference_id"),
}
"""What an id may name, and where it stands; an earlier kind wins."""

_MANY = 20
_SHORT = 2
"""Messages of a conversation that its texts show as well."""


@app.command(rich_help_panel=ROWS)
def show(
    id: Annotated[
        str, typer.Argument(help="An experience, group, run, task or preference; or its beginning.")
    ],
    store: StoreOption = None,
    at: AtOption = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="An experience's tokens too, by their probabilities.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what the store knows of an experience, a group, a run, a task or a preference."""
    lake = open_store(store, at=at)
    kind, whole = _find(lake, id)
    readers: dict[str, Callable[[Store, str], Found]] = {
        "experience": _experience,
        "group": _group,
        "run": _run,
        "task": _task,
        "preference": _preference,
    }
    found = readers[kind](lake, whole)
    if as_json:
        print_json({"kind": kind, "id": whole, **found})
    else:
        _print(kind, whole, found, _tokenizer(lake, found) if tokens else None)


def _tokenizer(lake: "Store", found: Found) -> Any:
    return (
        heavy("evaluation.debug").tokenizer_of(lake, found["experience"])
        if "experience" in found
        else None
    )


def _find(lake: "Store", id: str) -> tuple[str, str]:
    """Return what kind of thing an id names, and the whole id when only its beginning was given."""
    from ...store.errors import NotFoundError
    from ...store.lineage.experience import forgotten

    for kind, (table, key) in KINDS.items():
        if _rows(lake, f"SELECT 1 FROM {table} WHERE {key} = {_quoted(id)} LIMIT 1"):
            return kind, id
    several = ""
    for kind, (table, key) in KINDS.items():
        begins = f"SELECT DISTINCT {key} AS id FROM {table} WHERE starts_with({key}, {_quoted(id)})"
        ids = [row["id"] for row in _rows(lake, f"{begins} ORDER BY id LIMIT {_MANY}")]
        if len(ids) == 1:
            return kind, ids[0]
        if ids and not several:
            number = f"{_MANY} or more" if len(ids) == _MANY else str(len(ids))
            several = f"`{id}` begins {number} ids, such as {kind} `{ids[0]}`; give more of it"
    raise NotFoundError(
        several
        or forgotten(lake, id)
        or f"nothing in {lake.uri} has the id `{id}`; "
        'ids are found with `rlake sql "SELECT experience_id FROM experiences"`'
    )


def _rows(lake: "Store", query: str) -> list[Found]:
    return lake.sql(query).to_arrow_table().to_pylist()


def _quoted(text: str) -> str:
    from ...store.query import literal

    return literal(text)


def _experience(lake: "Store", id: str) -> Found:
    key = _quoted(id)
    (row,) = _rows(lake, f"SELECT * FROM experiences WHERE experience_id = {key}")
    tasks = _rows(lake, f"SELECT * FROM tasks WHERE task_id = {_quoted(row['task_id'])}")
    draws = (
        "SELECT run_id, attempt, step, position, epoch, weight, lag, advantage, sampler "
        f"FROM draws_current WHERE experience_id = {key} ORDER BY run_id, step, position"
    )
    scores = (
        "SELECT scorer, scorer_version, value, detail FROM scores "
        f"WHERE experience_id = {key} ORDER BY scorer, scorer_version"
    )
    feedback = (
        "SELECT annotator, label, score, comment FROM feedback "
        f"WHERE experience_id = {key} ORDER BY created_at"
    )
    return {
        "experience": row,
        "task": tasks[0] if tasks else None,
        "draws": _rows(lake, draws),
        "scores": _rows(lake, scores),
        "feedback": _rows(lake, feedback),
    }


def _group(lake: "Store", id: str) -> Found:
    key = _quoted(id)
    rows = (
        "SELECT experience_id, rollout, source, policy_version, reward, num_tokens, finish_reason, "
        f"response_text FROM experiences WHERE group_id = {key} ORDER BY rollout, experience_id"
    )
    (group,) = _rows(
        lake, f"SELECT * FROM groups WHERE group_id = {key} ORDER BY num_rollouts DESC LIMIT 1"
    )
    tasks = _rows(lake, f"SELECT * FROM tasks WHERE task_id = {_quoted(group['task_id'])}")
    return {
        "group": group,
        "task": tasks[0] if tasks else None,
        "experiences": _rows(lake, rows),
    }


def _run(lake: "Store", id: str) -> Found:
    key = _quoted(id)
    jobs = (
        "SELECT job, status, attempt, start_step, started_at, ended_at, error "
        f"FROM runs WHERE run_id = {key} ORDER BY job"
    )
    newest = (
        "SELECT name, config, code_version FROM job_events "
        f"WHERE run_id = {key} ORDER BY created_at"
    )
    metrics = (
        "SELECT job, name, arg_max(value, step) AS newest, arg_min(value, step) AS first, "
        f"max(step) AS step FROM metrics_current WHERE run_id = {key} GROUP BY ALL ORDER BY ALL"
    )
    backlog = f"SELECT * EXCLUDE (run_id) FROM backlog WHERE run_id = {key}"
    rows = f"SELECT count(*) AS num_rows FROM experiences WHERE run_id = {key} HAVING num_rows > 0"
    weights = (
        "SELECT max(policy_version) AS newest, count(*) AS published "
        f"FROM policies_current WHERE run_id = {key}"
    )
    measured = (
        "SELECT step AS policy_version, max(value) FILTER (name = 'eval/accuracy') AS accuracy, "
        "max(value) FILTER (name = 'eval/reward_mean') AS reward_mean FROM metrics_current "
        f"WHERE run_id = {key} AND job = 'evaluate' GROUP BY step ORDER BY step DESC LIMIT {_MANY}"
    )
    measurements = _rows(lake, measured)[::-1]
    return {
        "run": _rows(lake, newest)[-1],
        "jobs": _rows(lake, jobs),
        "experiences": _rows(lake, backlog) or _rows(lake, rows),
        "policies": _rows(lake, weights),
        **({"measurements": measurements} if measurements else {}),
        "metrics": _rows(lake, metrics),
    }


def _task(lake: "Store", id: str) -> Found:
    key = _quoted(id)
    groups = (
        "SELECT run_id, group_id, num_rollouts, reward_mean, pass_rate FROM groups "
        f"WHERE task_id = {key} ORDER BY run_id, group_id LIMIT {_MANY}"
    )
    (task,) = _rows(lake, f"SELECT * FROM tasks WHERE task_id = {key}")
    return {"task": task, "groups": _rows(lake, groups)}


def _preference(lake: "Store", id: str) -> Found:
    (pair,) = _rows(lake, f"SELECT * FROM preferences WHERE preference_id = {_quoted(id)}")
    both = f"({_quoted(pair['chosen_id'])}, {_quoted(pair['rejected_id'])})"
    query = (
        "SELECT experience_id, reward, response_text FROM experiences "
        f"WHERE experience_id IN {both} ORDER BY experience_id = {_quoted(pair['rejected_id'])}"
    )
    return {"preference": pair, "experiences": _rows(lake, query)}


_TEXTS = ("prompt_text", "response_text")
_HIDDEN = ("messages", "token_ids", "loss_mask", "logprobs", "config")
"""Shown as text, in other words, or with `--json`."""


def _print_conversation(row: Found, tokenizer: Any) -> None:
    """Print the turns of a conversation that has several, and the tokens with their chances."""
    messages = json.loads(row["messages"]) if row["messages"] else []
    if len(messages) > _SHORT:
        print_turns(messages)
    if tokenizer is not None and row["token_ids"] is not None:
        from ..evaluation.debug import pieces

        print_tokens(row, pieces(row["token_ids"], tokenizer))


def _print(kind: str, id: str, found: Found, tokenizer: Any = None) -> None:
    print_heading(f"{kind} {id}")
    main = found[kind]
    print_fields({k: _plain(k, v) for k, v in main.items() if _is_shown(kind, k, v)}, indent=2)
    task = found.get("task")
    if kind in ("experience", "group"):
        _print_task(task, main["task_id"])
    if kind == "experience":
        asked = task["prompt_text"] if task else None
        texts = [n for n in _TEXTS if main[n] is not None and main[n] != asked]
        print_heading("texts")
        print_fields({name: main[name] for name in texts}, indent=2)
        _print_conversation(main, tokenizer)
    for name, rows in found.items():
        if rows == []:
            print_heading(f"{name}: none")
        elif isinstance(rows, list):
            print_heading(name)
            print_rows(list(rows[0]), [list(row.values()) for row in rows])


def _is_shown(kind: str, name: str, value: object) -> bool:
    if name == f"{kind}_id" or name in _HIDDEN or (kind == "experience" and name in _TEXTS):
        return False
    return value is not None or name == "reward"


def _plain(name: str, value: Any) -> Any:
    """Write named values as `name value`, a part a line."""
    if name in ("rewards", "metrics", "timings") and isinstance(value, list):
        return "\n".join(f"{p['name']} {_number(p['value'])}" for p in value)
    return value


def _number(value: float | None) -> str:
    return "NULL" if value is None else f"{value:.6g}"


def _print_task(task: Found | None, task_id: str) -> None:
    if task is None:
        print_fields({"task": f"{task_id} is not in this store"}, indent=2)
        return
    print_heading(f"task {task_id}")
    shown = ("taskset", "split", "prompt_text", "answer")
    print_fields({k: task[k] for k in shown if task[k] is not None}, indent=2)

"""The command `show`: everything in the store about one ID."""

import json
from collections.abc import Callable, Mapping, Sequence
from math import exp
from typing import Annotated, Any

from rich.padding import Padding
from rich.text import Text

from ...store import Store
from ...store.errors import NotFoundError, closest
from ...store.lineage.experience import forgotten
from ...store.query import literal
from .app import ROWS, AtOption, JsonOption, StoreOption, app, argument, heavy, open_store, option
from .images import SHOWN, images_in, print_images
from .tables import print_fields, print_heading, print_json, print_rows, screen

Found = dict[str, Any]

KINDS = {
    "experience": ("experiences", "experience_id"),
    "group": ("experiences", "group_id"),
    "run": ("runs", "run_id"),
    "task": ("tasks", "task_id"),
    "preference": ("preferences", "preference_id"),
    "image": ("media", "media_id"),
}
"""What an ID may name, and its table and column; an earlier kind wins."""

_RUNS = "SELECT DISTINCT run_id AS id FROM runs"
_LISTED = (
    'runs with `rlake sql "SELECT run_id FROM runs"`, and other IDs with `rlake sql '
    '"SELECT experience_id FROM experiences"`'
)
_MANY = 20
_SHORT = 2
"""Conversations of at most this many messages are shown by their texts."""


@app.command(rich_help_panel=ROWS)
def show(
    id: Annotated[
        str,
        argument(
            "Show the experience, group, run, task, preference or image with this ID, or ID prefix."
        ),
    ],
    store: StoreOption = None,
    at: AtOption = None,
    tokens: Annotated[
        bool, option("Also print an experience's tokens, colored by probability.", "--tokens")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what the store knows of an experience, a group, a run, a task, a preference or an image.

    Images are drawn where the output is a terminal.
    """
    lake = open_store(store, at=at)
    kind, whole = _find(lake, id)
    readers: dict[str, Callable[[Store, str], Found]] = {
        "experience": _experience,
        "group": _group,
        "run": _run,
        "task": _task,
        "preference": _preference,
        "image": _image,
    }
    found = readers[kind](lake, whole)
    if as_json:
        print_json({"kind": kind, "id": whole, **found})
    else:
        tokenizer = None
        if tokens and kind == "experience":
            tokenizer = heavy("evaluation.debug").tokenizer_of(lake, found[kind])
        _print(kind, whole, found, tokenizer)
        shown = found[kind].get("messages") or (found.get("task") or {}).get("messages")
        one = [{name: found[kind][name] for name in SHOWN}] if kind == "image" else []
        images = one or images_in(lake, shown)
        if images:
            print_images(lake, images)


def _find(lake: "Store", id: str) -> tuple[str, str]:
    """Return the kind of an ID, and the whole ID where only a prefix was given."""
    for kind, (table, key) in KINDS.items():
        if _rows(lake, f"SELECT 1 FROM {table} WHERE {key} = {literal(id)} LIMIT 1"):
            return kind, id
    several = ""
    for kind, (table, key) in KINDS.items():
        begins = f"SELECT DISTINCT {key} AS id FROM {table} WHERE starts_with({key}, {literal(id)})"
        ids = [row["id"] for row in _rows(lake, f"{begins} ORDER BY id LIMIT {_MANY}")]
        if len(ids) == 1:
            return kind, ids[0]
        if ids and not several:
            number = f"{_MANY} or more" if len(ids) == _MANY else str(len(ids))
            several = f"`{id}` matches {number} IDs, such as {kind} `{ids[0]}`; give more of it"
    # Runs alone have names that people choose, and so mistype.
    close = closest(id, [row["id"] for row in _rows(lake, _RUNS)])
    hint = f"; did you mean the run `{close}`?" if close else f"; list {_LISTED}"
    raise NotFoundError(
        several or forgotten(lake, id) or f"nothing in {lake.uri} has the id `{id}`{hint}"
    )


def _rows(lake: "Store", query: str) -> list[Found]:
    return lake.sql(query).to_arrow_table().to_pylist()


def _experience(lake: "Store", id: str) -> Found:
    key = literal(id)
    (row,) = _rows(lake, f"SELECT * FROM experiences WHERE experience_id = {key}")
    tasks = _rows(lake, f"SELECT * FROM tasks WHERE task_id = {literal(row['task_id'])}")
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
    key = literal(id)
    rows = (
        "SELECT experience_id, rollout_index, source, policy_version, reward, num_tokens, "
        f"finish_reason, response_text FROM experiences WHERE group_id = {key} "
        "ORDER BY rollout_index, experience_id"
    )
    # two runs may have a group of this id: the larger one is shown
    (group,) = _rows(
        lake, f"SELECT * FROM groups WHERE group_id = {key} ORDER BY num_rollouts DESC LIMIT 1"
    )
    tasks = _rows(lake, f"SELECT * FROM tasks WHERE task_id = {literal(group['task_id'])}")
    return {"group": group, "task": tasks[0] if tasks else None, "experiences": _rows(lake, rows)}


def _run(lake: "Store", id: str) -> Found:
    key = literal(id)
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
    key = literal(id)
    groups = (
        "SELECT run_id, group_id, num_rollouts, reward_mean, pass_rate FROM groups "
        f"WHERE task_id = {key} ORDER BY run_id, group_id LIMIT {_MANY}"
    )
    (task,) = _rows(lake, f"SELECT * FROM tasks WHERE task_id = {key}")
    return {"task": task, "groups": _rows(lake, groups)}


def _preference(lake: "Store", id: str) -> Found:
    (pair,) = _rows(lake, f"SELECT * FROM preferences WHERE preference_id = {literal(id)}")
    both = f"({literal(pair['chosen_id'])}, {literal(pair['rejected_id'])})"
    query = (
        "SELECT experience_id, reward, response_text FROM experiences "
        f"WHERE experience_id IN {both} ORDER BY experience_id = {literal(pair['rejected_id'])}"
    )
    return {"preference": pair, "experiences": _rows(lake, query)}


def _image(lake: Store, id: str) -> Found:
    key = literal(id)
    (image,) = _rows(lake, f"SELECT * EXCLUDE (data) FROM media WHERE media_id = {key}")
    shown = (
        "SELECT experience_id, task_id, position FROM shown_media "
        f"WHERE media_id = {key} ORDER BY experience_id, position LIMIT {_MANY}"
    )
    return {"image": image, "experiences": _rows(lake, shown)}


_TEXTS = ("prompt_text", "response_text")
_HIDDEN = ("messages", "token_ids", "loss_mask", "logprobs", "routed_experts", "config")
"""Shown as text, in another form, or with `--json`."""


def _print_conversation(row: Found, tokenizer: Any) -> None:
    messages = json.loads(row["messages"]) if row["messages"] else []
    if len(messages) > _SHORT:
        print_turns(messages)
    if tokenizer is not None and row["token_ids"] is not None:
        from ..evaluation.debug import pieces

        print_tokens(row, pieces(row["token_ids"], tokenizer))


def _print(kind: str, id: str, found: Found, tokenizer: Any = None) -> None:
    print_heading(f"{kind} {id}")
    # The thing itself comes first, without what is too long to read; lists that
    # belong to it follow.
    main = found[kind]
    print_fields({k: _plain(k, v) for k, v in main.items() if _is_shown(kind, k, v)}, indent=2)
    task = found.get("task")
    if kind in ("experience", "group"):
        _print_task(task, main["task_id"])
    if kind == "experience":
        asked = task["prompt_text"] if task else None
        # The task's prompt is shown with the task; once is enough.
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
    if (
        name == f"{kind}_id"
        or kind == "image"
        or name in _HIDDEN
        or (kind == "experience" and name in _TEXTS)
    ):
        return False
    # A reward that is NULL says that the row is unscored, which the reader should see.
    return value is not None or name == "reward"


def _plain(name: str, value: Any) -> Any:
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


SHADES = ((0.9, "green"), (0.5, "cyan"), (0.1, "yellow"), (0.01, "magenta"), (0.0, "bold red"))
"""The color of sampled tokens, by their least probability."""
_PROMPT, _UNKNOWN = "dim", "underline"


def shade(logprob: float) -> str:
    """Return the color of a token that was sampled with this log-prob.

    >>> shade(-0.01), shade(-1.0), shade(-9.0)
    ('green', 'yellow', 'bold red')
    """
    # Rounding may bring a log-probability above 0.
    return next(style for least, style in SHADES if exp(min(logprob, 0.0)) >= least)


def colored(pieces: Sequence[str], mask: Sequence[bool], logprobs: Sequence[float] | None) -> Text:
    """Return tokens in their colors; prompt tokens are dim, line ends are visible."""
    text = Text()
    for i, (piece, sampled) in enumerate(zip(pieces, mask, strict=True)):
        style = _PROMPT
        if sampled:
            style = _UNKNOWN if logprobs is None else shade(logprobs[i])
        text.append(piece.replace("\n", "⏎\n"), style=style)
    return text


def legend() -> Text:
    """Return the legend of the colors."""
    text = Text("prompt ", style=_PROMPT)
    for least, style in SHADES:
        text.append(f" {'>=' if least else '<'} {least or SHADES[-2][0]:g} ", style=style)
    return text


def print_tokens(row: Mapping[str, Any], pieces: Sequence[str]) -> None:
    """Print a row's tokens, colored by probability."""
    console = screen()
    print_heading("tokens, by sampling probability")
    console.print(Padding(legend(), (0, 0, 0, 2)))
    console.print(Padding(colored(pieces, row["loss_mask"], row["logprobs"]), (0, 0, 0, 2)))


def print_turns(messages: Sequence[Mapping[str, Any]]) -> None:
    """Print a conversation, turn by turn."""
    print_heading("turns")
    summary: dict[str, str] = {}
    for i, message in enumerate(messages):
        text = str(message.get("content") or "")
        for call in message.get("tool_calls") or ():
            function = call.get("function", {})
            text += f"\n-> {function.get('name') or '?'}({function.get('arguments')})"
        summary[f"{i + 1} {message.get('role')}"] = text.strip()
    print_fields(summary, indent=2)

"""What can be queried: print the tables, views and macros, or the columns of one."""

from typing import TYPE_CHECKING

from ...store.errors import NotFoundError, nearest
from ...store.schema import TABLES
from .tables import print_heading, print_json, print_rows, screen

if TYPE_CHECKING:
    from ...store import Store

VIEWS = {
    "groups": "a group: mean, spread and pass rate of its rewards",
    "steps": "an optimizer step: what it was trained on",
    "trained_rows": "a draw that trained a row: its step, and what the row is",
    "outcomes": "a row that a run sampled to train on: what became of it",
    "backlog": "a run: how many of its rows are fresh, stale, undrawn",
    "draws_current": "a draw that counts: superseded attempts left out",
    "metrics_current": "a metric that counts, likewise",
    "policies_current": "a set of weights that counts, likewise",
    "runs": "a job: its status",
    "tasks_current": "a task that counts: those removed by `rlake undo` left out",
    "experiences_current": "an experience that counts, likewise",
    "preferences_current": "a pair that counts, likewise, both of its experiences too",
    "withdrawn": "an import or pipeline run that was undone, and what replaced it",
    "makers": "a row, and an import or pipeline run that gave it",
    "scores_current": "a scorer's newest verdict on an experience",
    "feedback_current": "an annotator's newest label of an experience",
    "experience_values_current": "the newest value of a derived column of an experience",
    "turns": "a message of a conversation",
    "tool_calls": "a call of a tool, with its result",
    "task_pass_rates": "how a run did on a task",
    "task_values_current": "the newest value of a name of a task",
    "labels": "the label that a person gives an item of a labeling queue",
    "agreement": "a labeling queue: how far its annotators agree",
    "pairwise_agreement": "two people of a queue: Cohen's kappa",
    "adjudicated": "an item: its majority label",
}
"""Public views, and what a row is."""

MACROS = {
    "pass_at_k(n, c, k)": "pass@k: chance that one of k of n rollouts is correct, if c of n are",
    "change_within(n, m, n2, m2)": "what a bin's own mean explains of how the whole mean changed",
    "change_mix(n, m, n2, m2)": "what a bin's share of the rows explains of it",
    "sampled_logprob(logprobs, loss_mask)": "the log-prob of the sampled tokens of a row",
    "importance_weight(target_logprobs, logprobs, loss_mask)": "how much likelier a row is there",
    "doubt(logprobs, loss_mask)": "the sum of 1 - p over the sampled tokens",
    "is_repetitive(text)": "whether at most a fifth of the words of a text are different",
    "has_empty_thought(text)": "whether nothing stands between <think> and </think>",
    "has_other_script(text, prompt)": "whether a text has letters of another script",
    "response_length(num_tokens, prompt_length, response_text)": "in tokens, of text in characters",
    "effective_sample_size(weight)": "how many rows of equal weight the rows are worth (Kish)",
    "pass_hat_k(n, c, k)": "pass^k: chance that all of k of n rollouts are correct, if c of n are",
}
"""Public macros, and what they return."""


def print_tables(lake: "Store", *, as_json: bool = False) -> None:
    """Print the tables with their row counts, the views and the macros."""
    versions = lake.versions()
    listed = [(t.name, lake.count(t.name), versions[t.name], t.row) for t in TABLES.values()]
    for name, version in lake.user_versions().items():
        [(rows,)] = lake.sql(f'SELECT count(*) FROM "{name}"').fetchall()
        listed.append((name, rows, version, "a row of your own table"))
    columns = ("table", "rows", "version", "a row is")
    if as_json:
        print_json({"tables": [dict(zip(columns, row, strict=True)) for row in listed]})
        return
    print_rows(columns, listed)
    screen().print()
    print_rows(("view", "a row is"), list(VIEWS.items()))
    screen().print()
    print_rows(("macro", "returns"), list(MACROS.items()))


def print_columns(lake: "Store", name: str, *, as_json: bool = False) -> None:
    """Print the columns of a table or view; raise NotFoundError for an unknown one."""
    # Only known names reach the query below, and so need no quotes.
    if name not in TABLES and name not in VIEWS:
        raise NotFoundError(
            f"table or view `{name}` does not exist{nearest(name, [*TABLES, *VIEWS])}"
        )
    if name in TABLES:
        header, row = ("column", "type", "must be there", "meaning"), TABLES[name].row
        listed = [
            (c.name, str(c.type), "yes" if c.required else "", c.note) for c in TABLES[name].columns
        ]
    else:
        header, row = ("column", "type"), VIEWS[name]
        view = lake.sql(f"SELECT * FROM {name}")
        listed = [(c, str(t).lower()) for c, t in zip(view.columns, view.types, strict=True)]
    if as_json:
        found = [dict(zip(header, values, strict=True)) for values in listed]
        print_json({"table": name, "row": row, "columns": found})
        return
    print_heading(f"{name}: {row}")
    print_rows(header, listed)

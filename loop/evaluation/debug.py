"""One task tried once, with a live engine, and everything that came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...operators.async_map import run_apart
from ...store import Experience, Store, Task
from ...store.errors import NotFoundError
from ...store.query import literal
from ..config import RunConfig
from ..rollouts.group import run_group
from ..rollouts.setup import trying
from ..trajectories.rows import fitting
from .policies import PolicyPool, subject, with_models

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Tried:
    """What a try came to: its rows as they would be stored, and the tokenizer that reads them."""

    task: Task
    label: str
    """Which policy answered."""
    rows: Sequence[Experience]
    tokenizer: "PreTrainedTokenizerFast | None"


def try_once(
    store: Store,
    config: RunConfig,
    task: Task,
    *,
    version: int | None = None,
    model: str | Path | None = None,
    tries: int = 1,
) -> Tried:
    """Try a task as the explorer would, and store nothing.

    With the run's newest policy, a version of it, a model, or what the run begins with.
    """
    config = with_models(store, config)
    how = replace(trying(config, tries), run_id="debug")
    answering = PolicyPool(store, config, sampling=how.sampling)
    one = subject(store, config, version, model)
    try:
        policy = answering.policy(one)
        how.models.update(answering.others)
        rows = run_apart(run_group(task, policy, how, step=1, place=0))
    finally:
        answering.close()
    engine = getattr(policy, "engine", None)
    return Tried(task, one.label, fitting(rows), getattr(engine, "tokenizer", None))


def find_task(store: Store, name: str) -> Task:
    """Return the task whose id this is, or the only one whose id begins so.

    Raises NotFoundError for none, or several.
    """
    rows = store.sql(
        f"SELECT * FROM tasks WHERE starts_with(task_id, {literal(name)}) LIMIT 2"
    ).to_arrow_table()
    found = rows.to_pylist()
    if len(found) != 1:
        many = "begins several tasks; give more of it" if found else "is no task of this store"
        raise NotFoundError(
            f'`{name}` {many}; ids are found with `rlake sql "SELECT task_id FROM tasks"`, and '
            "`--ask` makes one up"
        )
    return Task.from_row(found[0])


def tokenizer_of(store: Store, row: Mapping[str, Any]) -> "PreTrainedTokenizerFast | None":
    """Return the tokenizer of the run that a stored row is of, None where its folder is gone."""
    from ..models.load import tokenizer_in

    if store.runs_folder is None or row.get("run_id") is None:
        return None
    return tokenizer_in(store.runs_folder / str(row["run_id"]).partition(":")[0] / "model")


def pieces(token_ids: Sequence[int], tokenizer: "PreTrainedTokenizerFast | None") -> list[str]:
    """Return what each token says; without a tokenizer, its number."""
    if tokenizer is None:
        return [f"{token} " for token in token_ids]
    return [str(tokenizer.decode([token])) for token in token_ids]

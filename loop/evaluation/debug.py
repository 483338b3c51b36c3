"""Run one task with a live engine and return everything it produced; nothing is stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...operators.concurrency import run_apart
from ...store import Experience, Store, Task
from ...store.errors import NotFoundError
from ...store.query import literal
from ..config import ExplorerConfig, RunConfig
from ..models.load import tokenizer_digest, tokenizer_in
from ..rollouts.group import run_group, workflow_of
from ..rollouts.setup import RolloutSpecs
from ..rollouts.writer import fitting
from .policies import PolicyPool, subject, with_models

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class DebugResult:
    """The rows of the rollouts as they would be stored, and the tokenizer that decodes them."""

    task: Task
    label: str
    """Which policy answered."""
    rows: Sequence[Experience]
    tokenizer: "PreTrainedTokenizerFast | None"


def run_task(
    store: Store,
    config: RunConfig,
    task: Task,
    *,
    version: int | None = None,
    model: str | Path | None = None,
    rollouts: int = 1,
) -> DebugResult:
    """Run a task as the explorer would, by `explorer.workflow`, and store nothing.

    The policy is the given version or model, else the run's newest version, else the model that
    the run starts from.
    """
    config = with_models(store, config)
    specs = RolloutSpecs(config)
    explorer = config.explorer or ExplorerConfig()
    # not by a workflow of its taskset: that of the explorer is the one to try
    workflow = workflow_of(explorer.workflow, explorer.auxiliary_models)
    changes = {"workflow": workflow, "group_size": rollouts, "greedy_rollouts": 0}
    spec = replace(specs.of(task), **changes, run_id="debug")
    pool = PolicyPool(store, config, sampling=spec.sampling)
    one = subject(store, config, version, model)
    try:
        policy = pool.policy(one)
        specs.models.update(pool.others)
        rows = run_apart(run_group(task, policy, spec, batch=1, group_index=0))
    finally:
        pool.close()
    engine = getattr(policy, "engine", None)
    return DebugResult(task, one.label, fitting(rows), getattr(engine, "tokenizer", None))


def find_task(store: Store, name: str) -> Task:
    """Return the task with this ID, or the only task whose ID starts with it.

    Raises NotFoundError for no such task, or several.
    """
    rows = store.sql(
        f"SELECT * FROM tasks WHERE starts_with(task_id, {literal(name)}) LIMIT 2"
    ).to_arrow_table()
    found = rows.to_pylist()
    if len(found) != 1:
        many = (
            "matches several tasks; give more of the ID" if found else "is not a task of this store"
        )
        raise NotFoundError(
            f'`{name}` {many}; list IDs with `rlake sql "SELECT task_id FROM tasks"`, '
            "or ask a new question with `--ask`"
        )
    return Task.from_row(found[0])


def tokenizer_of(store: Store, row: Mapping[str, Any]) -> "PreTrainedTokenizerFast | None":
    """Return the tokenizer of a row's tokens; None where no run of the store still has it."""
    folders = [] if store.runs_folder is None else sorted(store.runs_folder.glob("*/model"))
    for tokenizer in filter(None, map(tokenizer_in, folders)):
        if tokenizer_digest(tokenizer) == row.get("tokenizer"):
            return tokenizer
    return None


def pieces(token_ids: Sequence[int], tokenizer: "PreTrainedTokenizerFast | None") -> list[str]:
    """Return the text of each token, or its number without a tokenizer."""
    if tokenizer is None:
        return [f"{token} " for token in token_ids]
    return [str(tokenizer.decode([token])) for token in token_ids]

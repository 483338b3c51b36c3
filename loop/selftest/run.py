"""The self-test: run recipes to check that a machine, a model or an engine learns."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

from ...store import Store, connect
from ...store.errors import ConfigError, nearest
from ...store.files import import_rows, open_input
from ...store.query import literal
from ..config import Stage, build_stages
from ..config.load import override, read
from ..environments.alfworld import has_games
from ..evaluation.evaluate import evaluate
from ..recipes import guru
from ..recipes.gsm8k import find
from ..runs.progress import Display
from ..stages import run_stage, standing

RECIPES = {
    "alfworld": "alfworld",
    "arithmetic": "sft_then_grpo",
    "countdown": "countdown",
    "frozen_lake": "frozen_lake",
    "gsm8k": "grpo_gsm8k",
    "guru_math": "grpo_guru_math",
    "textworld": "textworld",
}
"""Tasks of the self-test, and the recipe of each."""
_FORMATS = {"gsm8k": "gsm8k", "guru_math": "verl_tasks"}
"""The formats of the tasks that are files."""
EDGE = 5
"""Number of first and of last training steps whose rewards are compared."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Changes to the recipes."""

    steps: int | None = None
    """RL steps; None: the recipe's."""
    seed: int = 0
    model: str | None = None
    """Folder of the model to start from; None: the recipe's tiny model."""
    engine: str | None = None
    """Engine, such as `transformers` or `{vllm: {max_restarts: 0}}`."""
    data: Path | None = None
    """Folder of train.jsonl and test.jsonl for tasks that are files; None: RLAKE_DATA (GSM8K), else
    generated ones of their shape."""
    overrides: tuple[str, ...] = ()
    """More changes, such as `trainer.learning_rate=1e-4`."""
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class SelfTestResult:
    """The result of one task."""

    task: str
    recipe: str
    before: float
    """Accuracy right before RL, after the warm start where there is one."""
    after: float
    first_reward: float
    """Mean reward of the rows of the first steps."""
    last_reward: float
    steps: int
    seconds: float
    """Time of all stages, evaluations included."""
    samples: int
    tokens: int
    """Sampled while exploring."""
    tokens_per_second: float
    """Over the time spent exploring, workflows and rewards included."""
    num_tasks: int
    """Tasks that it was evaluated on."""
    num_trained_on: int
    """Evaluation tasks of which a row was trained on."""
    data: str
    """Where the tasks come from."""
    rewards: tuple[tuple[int, float], ...]
    """Mean reward of each step's rows."""
    store: str

    @property
    def is_held_out(self) -> bool:
        """Whether it was evaluated on tasks that were never trained on."""
        return self.num_tasks > 0 and not self.num_trained_on

    def summary(self) -> dict[str, Any]:
        """Return the figures, without the curve."""
        message = {name: value for name, value in asdict(self).items() if name != "rewards"}
        return message | {"is_held_out": self.is_held_out}


def run(names: Sequence[str], folder: Path, options: Options) -> list[SelfTestResult]:
    """Run one task after the other, each in its own store in the folder.

    Raises ConfigError for an unknown task, when the folder holds something, or for missing data.
    """
    chosen = _chosen(names)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"`{folder}` exists and is not empty; choose another `--folder`")
    if options.data is not None and not (options.data / "train.jsonl").is_file():
        place = options.data / "train.jsonl"
        raise ConfigError(f"`{place}` does not exist; set `--data` to GSM8K's folder")
    plans = {name: staged(name, options) for name in chosen}
    return [_verified(name, stages, folder, options) for name, stages in plans.items()]


def staged(name: str, options: Options) -> tuple[Stage, ...]:
    """Return the stages of a task with the options applied; the last one that trains is RL."""
    recipe = RECIPES[name]
    changes = [f"seed={options.seed}"]
    if options.model is not None:
        changes.append(f"model.path={options.model}")
    changes += [change for change in options.overrides if not change.startswith("stages.")]
    tree = read(recipe)
    if "stages" not in tree:
        tree["stages"] = _with_evaluations(tree.pop("algorithm"))
    # into the tree: `build_stages` applies its changes to every stage
    for change in options.overrides:
        if change.startswith("stages."):
            override(tree, change)
    if options.steps is not None:
        override(tree, f"stages.{_learning(tree)}.trainer.steps={options.steps}")
    if options.engine is not None:
        parts = [part for part in (tree, *tree["stages"].values()) if part.get("explorer")]
        for part in parts:
            override(part, f"explorer.engine={options.engine}")
        if not parts:  # what only imitates samples in its evaluations
            override(tree, f"evaluate.engine={options.engine}")
    return build_stages(tree, changes)


def _learning(tree: dict[str, Any]) -> str:
    """Return the stage that is measured: the last one that trains."""
    *_, last = [n for n, s in tree["stages"].items() if {"trainer", "data", "algorithm"} & set(s)]
    return last


def _with_evaluations(algorithm: Any) -> dict[str, Any]:
    """Return stages for a recipe without any: evaluate, train, evaluate."""
    return {
        "before": {"evaluate": {}},
        "learn": {"algorithm": algorithm},
        "after": {"evaluate": {}},
    }


def _chosen(names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in RECIPES and name != "all":
            known = [*RECIPES, "all"]
            raise ConfigError(f"the self-test has no task `{name}`{nearest(name, known)}")
    # a task whose package or data are missing is refused by its name, and left out of all
    if "all" in names:
        has_engine = find_spec("textworld") is not None
        there = {"textworld": has_engine, "alfworld": has_engine and has_games()}
        return [name for name in RECIPES if there.get(name, True)]
    return list(dict.fromkeys(names))


def _verified(name: str, stages: Sequence[Stage], folder: Path, options: Options) -> SelfTestResult:
    began = perf_counter()
    store = connect(folder / name)
    data = "made by the recipe"
    if name in _FORMATS:
        data = _imported(store, name, folder, options.data)
    shares = list(_shares(store, stages, options))
    learned = [stage for stage in stages if stage.kind == "train"][-1].label
    rewards = store.sql(
        f"SELECT step, reward_mean FROM steps WHERE run_id = {literal(learned)} "
        "AND reward_mean IS NOT NULL ORDER BY step"
    ).fetchall()
    values = [reward for _, reward in rewards] or [0.0]
    work = _work(store, learned) | evaluated_tasks(store)
    return SelfTestResult(
        task=name,
        recipe=RECIPES[name],
        before=shares[-2],
        after=shares[-1],
        first_reward=mean(values[:EDGE]),
        last_reward=mean(values[-EDGE:]),
        steps=len(rewards),
        seconds=perf_counter() - began,
        rewards=tuple(rewards),
        store=store.uri,
        data=data,
        **work,
    )


def _shares(store: Store, stages: Sequence[Stage], options: Options) -> Iterator[float]:
    """Run stages, and yield the accuracy of each evaluation."""
    for stage, _ in standing(store, stages):
        steps = stage.config.trainer.steps
        with Display(stage.config, total_steps=steps, quiet=options.quiet) as display:
            if stage.kind == "evaluate":
                made = evaluate(
                    store, stage.config, model=stage.model, title=stage.label, listener=display
                )
                yield made.accuracy
            else:
                run_stage(store, stage, listener=display)


def _work(store: Store, run: str) -> dict[str, Any]:
    [(samples,)] = store.sql(
        f"SELECT count(*) FROM experiences WHERE run_id = {literal(run)}"
    ).fetchall()
    [(tokens, seconds)] = store.sql(
        "SELECT coalesce(sum(value) FILTER (name = 'explore/sampled_tokens'), 0), "
        "coalesce(sum(value) FILTER (name = 'explore/seconds'), 0) "
        f"FROM metrics_current WHERE run_id = {literal(run)}"
    ).fetchall()
    rate = tokens / seconds if seconds else 0.0
    return {"samples": samples, "tokens": int(tokens), "tokens_per_second": rate}


def evaluated_tasks(store: Store) -> dict[str, int]:
    """Return how many tasks were evaluated on, and how many of them were also trained on."""
    [(tasks, trained)] = store.sql(
        "WITH trained AS (SELECT DISTINCT e.task_id FROM draws_current d "
        "JOIN experiences e USING (experience_id) WHERE d.weight > 0) "
        "SELECT count(DISTINCT task_id), "
        "count(DISTINCT task_id) FILTER (task_id IN (SELECT task_id FROM trained)) "
        "FROM experiences WHERE purpose = 'eval'"
    ).fetchall()
    return {"num_tasks": tasks, "num_trained_on": trained}


def _imported(store: Store, name: str, folder: Path, data: Path | None) -> str:
    """Import a task's files, or generated ones in their place; return where they come from."""
    place, origin = data, f"the files in {data}"
    if place is None and name == "gsm8k":
        found = find(folder / "gsm8k_data")
        place, origin = found.folder, str(found)
    elif place is None:
        place = guru.write_stand_in(folder / "guru_data")
        origin = f"a generated stand-in for Guru's mathematics, in {place}"
    for split in ("train", "test"):
        with open_input(place / f"{split}.jsonl", format=_FORMATS[name]) as source:
            import_rows(store, "tasks", source, taskset=name, split=split)
    return origin

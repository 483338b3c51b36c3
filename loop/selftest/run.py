"""Quick verification: recipes that are run to see that a machine, a model or an engine learns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from ..evaluation.evaluate import evaluate
from ..recipes.toys.gsm8k import Files, find
from ..runs.progress import Display
from ..stages import run_stage, standing
from . import plot

RECIPES = {
    "arithmetic": "sft_then_grpo",
    "countdown": "countdown",
    "frozen_lake": "frozen_lake",
    "gsm8k": "grpo_gsm8k",
}
"""What can be verified, and the recipe that does it."""
EDGE = 5
"""Training steps at the start and at the end whose rewards are compared."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is changed in the recipes."""

    steps: int | None = None
    """Training steps of the reinforcement; None: the recipe's."""
    seed: int = 0
    model: str | None = None
    """Folder of a model to start from in place of the recipe's tiny one."""
    engine: str | None = None
    """What samples, as `transformers` or `{vllm: {server: true}}`."""
    data: Path | None = None
    """Folder of GSM8K's files; None: RLAKE_DATA, else generated ones of the same shape."""
    overrides: tuple[str, ...] = ()
    """More changes, as `trainer.learning_rate=1e-4`."""
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class SelfTestResult:
    """What a task came to."""

    task: str
    recipe: str
    before: float
    """Share right before the reinforcement, behind the warm start where there is one."""
    after: float
    first_reward: float
    """Mean reward of the rows that the first steps were trained on."""
    last_reward: float
    steps: int
    seconds: float
    """Of all stages, and of all measurements."""
    samples: int
    tokens: int
    """Sampled while exploring."""
    tokens_per_second: float
    """Over the time spent exploring, workflows and rewards included."""
    num_tasks: int
    """Tasks that it was measured on."""
    num_trained_on: int
    """Of them, those of which a row was trained on."""
    data: str
    """Where its tasks are from."""
    rewards: tuple[tuple[int, float], ...]
    """Mean reward of the rows that each step was trained on."""
    store: str

    @property
    def is_held_out(self) -> bool:
        """Whether it was measured on tasks that were never trained on."""
        return self.num_tasks > 0 and not self.num_trained_on

    def summary(self) -> dict[str, Any]:
        """Return the figures, without the curve."""
        message = {name: value for name, value in asdict(self).items() if name != "rewards"}
        return message | {"is_held_out": self.is_held_out}


def run(names: Sequence[str], folder: Path, options: Options) -> list[SelfTestResult]:
    """Verify one task after the other, each in a store of its own in the folder.

    Raises ConfigError for an unknown task, when the folder holds something, or for missing data.
    """
    chosen = _chosen(names)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"`{folder}` exists and is not empty; name a new one with `--folder`")
    if options.data is not None and not (options.data / "train.jsonl").is_file():
        place = options.data / "train.jsonl"
        raise ConfigError(f"`--data`: there is no `{place}`; name GSM8K's folder")
    plans = {name: staged(name, options) for name in chosen}
    return [_verified(name, stages, folder, options) for name, stages in plans.items()]


def staged(name: str, options: Options) -> tuple[Stage, ...]:
    """Return the stages of a task, as the options change them; the last that trains reinforces."""
    recipe = RECIPES[name]
    changes = [f"seed={options.seed}"]
    if options.model is not None:
        changes += ["model.from_scratch=null", f"model.path={options.model}"]
    changes += [change for change in options.overrides if not change.startswith("stages.")]
    tree = read(recipe)
    if "stages" not in tree:
        tree["stages"] = _measured(tree.pop("algorithm"))
    for change in options.overrides:
        if change.startswith("stages."):
            override(tree, change)
    if options.steps is not None:
        override(tree, f"stages.learn.trainer.steps={options.steps}")
    if options.engine is not None:
        for part in [tree, *tree["stages"].values()]:
            if part.get("explorer"):
                override(part, f"explorer.engine={options.engine}")
    return build_stages(tree, changes)


def _measured(algorithm: Any) -> dict[str, Any]:
    """Return the stages of a recipe that has none: measured before and after."""
    return {
        "before": {"evaluate": {}},
        "learn": {"algorithm": algorithm},
        "after": {"evaluate": {}},
    }


def _chosen(names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in RECIPES and name != "all":
            known = [*RECIPES, "all"]
            raise ConfigError(f"there is no task `{name}` to verify{nearest(name, known)}")
    return list(RECIPES) if "all" in names else list(dict.fromkeys(names))


def _verified(name: str, stages: Sequence[Stage], folder: Path, options: Options) -> SelfTestResult:
    """Run the stages of a task, and say what they came to."""
    began = perf_counter()
    store = connect(folder / name)
    data = "made by the recipe"
    if name == "gsm8k":
        data = _gsm8k(store, folder, options.data)
    shares = list(_shares(store, stages, options))
    learned = [stage for stage in stages if stage.kind == "train"][-1].label
    rewards = store.sql(
        f"SELECT step, reward_mean FROM steps WHERE run_id = {literal(learned)} "
        "AND reward_mean IS NOT NULL ORDER BY step"
    ).fetchall()
    values = [reward for _, reward in rewards] or [0.0]
    work = _work(store, learned) | measured_on(store)
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
    """Run stages, and yield the share right at each that measures."""
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
    """Return how much was sampled for a run, and how fast."""
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


def measured_on(store: Store) -> dict[str, int]:
    """Return how many tasks were measured on, and of how many of them rows were trained on."""
    [(tasks, trained)] = store.sql(
        "WITH trained AS (SELECT DISTINCT e.task_id FROM draws_current d "
        "JOIN experiences e USING (experience_id) WHERE d.weight > 0) "
        "SELECT count(DISTINCT task_id), "
        "count(DISTINCT task_id) FILTER (task_id IN (SELECT task_id FROM trained)) "
        "FROM experiences WHERE run_id LIKE '%:eval-%'"
    ).fetchall()
    return {"num_tasks": tasks, "num_trained_on": trained}


def _gsm8k(store: Store, folder: Path, data: Path | None) -> str:
    """Import the questions of GSM8K, or of what stands in for them; say which."""
    files = Files(data, is_real=True) if data is not None else find(folder / "gsm8k_data")
    for split in ("train", "test"):
        with open_input(files.folder / f"{split}.jsonl", format="gsm8k") as source:
            import_rows(store, "tasks", source, taskset="gsm8k", split=split)
    return str(files)


def picture(path: Path, made: Sequence[SelfTestResult]) -> None:
    """Draw the rewards of all tasks by training step into a PNG file."""
    curves: Mapping[str, plot.Points] = {one.task: one.rewards for one in made if one.rewards}
    plot.picture(path, curves, levels={}, title="rlake bench", y_label="mean reward")

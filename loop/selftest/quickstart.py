"""The quickstart: SFT on the answers of a forgetful expert, then GRPO, all through the store."""

import json
import resource
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from ...store import Store, connect
from ...store.errors import ConfigError
from ...store.files import import_rows, open_input
from ..config import RunConfig, load
from ..evaluation.evaluate import Evaluation, evaluate
from ..recipes.toys.sums import forgetful_answers
from ..run import run
from ..runs.job import run_folder
from ..runs.progress import Display
from ..tasks.prepare import prepare_tasks, select
from ..weight_sync import newest
from .report import Points, plot, text_plot

MAPPING = """
    SELECT t.task_id, i.question AS prompt_text, i.answer AS response_text,
           i.is_right::DOUBLE AS reward, 'expert' AS source
    FROM input i JOIN tasks t ON t.prompt_text = i.question
"""
"""How the expert's file becomes rows of `experiences`."""


@dataclass(frozen=True)
class Result:
    """The result of the quickstart; accuracies are on held-out tasks, with greedy sampling."""

    before: Evaluation
    warm_start: Evaluation
    after: Evaluation
    seconds: float
    peak_memory_mb: float
    store: str
    picture: str

    def summary(self) -> dict[str, Any]:
        """Return the figures for scripts."""
        return {
            "accuracy_before": self.before.accuracy,
            "accuracy_warm_start": self.warm_start.accuracy,
            "accuracy_after": self.after.accuracy,
            "seconds": round(self.seconds, 1),
            "peak_memory_mb": round(self.peak_memory_mb),
            "store": self.store,
            "picture": self.picture,
        }


def quickstart(folder: Path | None = None, *, seed: int = 0, quiet: bool = False) -> Result:
    """Run the quickstart in a new folder and print what happens, unless `quiet`.

    Raises ConfigError if the folder exists and is not empty.
    """
    began = perf_counter()
    console = Console(stderr=quiet, quiet=quiet, highlight=False)
    folder = _place(folder)
    store = connect(folder / "lake")
    sft = load("quickstart_sft", [f"seed={seed}"])
    prepare_tasks(store, sft.tasks)
    _introduce(console, store, folder)
    before = evaluate(store, sft)
    _import_expert(console, store, folder, seed)

    _head(console, "Warm start: imitate the expert (SFT from the store)")
    _run(store, sft, quiet=quiet)
    warm = evaluate(store, sft)
    start = newest(store, run_folder(store, sft), sft.name).folder

    _head(console, "Reinforcement: sample, score, improve (GRPO through the store)")
    grpo = load("quickstart_grpo", [f"seed={seed}", f"model.path={start}"])
    _run(store, grpo, quiet=quiet)
    after = evaluate(store, grpo)

    rewards = rewards_by_step(store, grpo.name)
    image = folder / "reward.png"
    levels = {"held-out, warm start": warm.accuracy, "held-out, after GRPO": after.accuracy}
    plot(
        image,
        {"reward of the rows trained on": rewards},
        levels=levels,
        title="rlake quickstart: two-digit sums",
        y_label="share right",
    )
    # bytes on macOS, KiB on Linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        1024**2 if sys.platform == "darwin" else 1024
    )
    result = Result(before, warm, after, perf_counter() - began, peak, store.uri, str(image))
    _conclude(console, store, folder, result, rewards)
    return result


def rewards_by_step(store: Store, run_id: str) -> list[tuple[float, float]]:
    """Return (step, mean reward of the rows it was trained on) of a run."""
    return store.sql(
        f"SELECT step, reward_mean FROM steps WHERE run_id = '{run_id}' ORDER BY step"
    ).fetchall()


def questions(store: Store) -> Mapping[str, str]:
    """Return three queries for the store of the quickstart, by what they answer."""
    return {
        "how the reward changed with each version of the policy": (
            "SELECT policy_version, round(avg(reward), 3) AS reward, count(*) AS rollouts "
            "FROM experiences WHERE run_id = 'quickstart_grpo' GROUP BY 1 ORDER BY 1 DESC LIMIT 10"
        ),
        "which held-out sums it still gets wrong": (
            "SELECT e.prompt_text, e.response_text, t.answer "
            "FROM experiences e JOIN tasks t USING (task_id) "
            "WHERE e.purpose = 'eval' AND e.reward = 0 ORDER BY e.created_at DESC LIMIT 10"
        ),
        "the sampled tokens with the lowest probability": (
            "SELECT prompt_text, response_text, reward, round(list_min(logprobs), 2) AS least_sure "
            "FROM experiences WHERE run_id = 'quickstart_grpo' ORDER BY least_sure LIMIT 10"
        ),
    }


def _place(folder: Path | None) -> Path:
    if folder is not None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"`{folder}` exists and is not empty; name a new folder")
        return folder.absolute()
    names = ["quickstart", *(f"quickstart-{i}" for i in range(2, 1000))]
    return next(Path(name).absolute() for name in names if not Path(name).exists())


def _import_expert(console: Console, store: Store, folder: Path, seed: int) -> None:
    """Write the expert's answers to a file, and import it as a user would."""
    path = folder / "expert_answers.jsonl"
    tasks = select(store, "split = 'train'")
    with path.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in forgetful_answers(tasks, seed=seed))
    with open_input(path) as source:
        done = import_rows(store, "experiences", source, sql=MAPPING)
    [(share,)] = store.sql("SELECT avg(reward) FROM experiences WHERE source = 'expert'").fetchall()
    console.print(
        f"imported {done.rows:,} answers of an expert that forgets to carry: {share:.0%} are right"
    )


def _run(store: Store, config: RunConfig, *, quiet: bool) -> None:
    with Display(config, total_steps=config.trainer.steps, quiet=quiet) as display:
        run(store, config, listener=display)


def _introduce(console: Console, store: Store, folder: Path) -> None:
    [(train, held_out)] = store.sql(
        "SELECT count(*) FILTER (split = 'train'), count(*) FILTER (split = 'eval') FROM tasks"
    ).fetchall()
    console.print(f"[bold]rlake quickstart[/] in {_short(folder)}")
    console.print(
        f"{train:,} sums to train on, {held_out:,} held-out sums to evaluate on; "
        "a model with random weights"
    )


def _head(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/]")


def _conclude(
    console: Console, store: Store, folder: Path, result: Result, rewards: Points
) -> None:
    table = Table(
        title="\nSums never trained on", title_justify="left", title_style="bold", box=None
    )
    table.add_column("")
    table.add_column("right", justify="right")
    table.add_column("policy", justify="right")
    for name, part in (
        ("before", result.before),
        ("after the warm start", result.warm_start),
        ("after GRPO", result.after),
    ):
        table.add_row(name, f"{part.accuracy:.1%}", f"version {part.policy_version}")
    console.print(table)
    console.print("\n[bold]Reward by training step[/]")
    console.print(text_plot(rewards))
    steps = len(rewards)
    console.print(" " * 6 + "1" + f"step {steps}".rjust(59))
    _where(console, store, folder, result)
    console.print("\n[bold]Query the store[/]")
    for what, query in questions(store).items():
        console.print(f"# {what}", style="dim")
        console.print(
            f'{_program()} sql --store {_short(folder / "lake")} "{query}"\n', soft_wrap=True
        )
    console.print(
        f"{result.seconds:.0f} s, {result.peak_memory_mb:,.0f} MB of memory at most", style="dim"
    )


def _where(console: Console, store: Store, folder: Path, result: Result) -> None:
    [(rows, tokens)] = store.sql("SELECT count(*), sum(num_tokens) FROM experiences").fetchall()
    places = {
        "lake": f"the store: {rows:,} experiences, {int(tokens):,} tokens with their log-probs",
        "lake/runs": "checkpoints and weights, in the Hugging Face format",
        "expert_answers.jsonl": "the expert's answers",
        "reward.png": "the curve above as a picture",
    }
    console.print("\n[bold]Files[/]")
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, what in places.items():
        table.add_row(_short(folder / name), what)
    console.print(Padding(table, (0, 0)))


def _short(path: Path) -> str:
    """Return a path relative to the current folder, where it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _program() -> str:
    """Return the name or path of this program, so that the commands shown can be pasted."""
    called = Path(sys.argv[0])
    if called.name != "rlake" or shutil.which("rlake") == str(called.absolute()):
        return "rlake"
    return _short(called.absolute())

"""The command line as a fixture, and the GSM8K files, or a stand-in of the same shape."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from rlake.loop.cli import run
from rlake.store import Store, Task, connect

DATA = Path(os.environ.get("RLAKE_DATA") or Path(__file__).parents[3] / "shared" / "data")
HAS_DATA = (DATA / "gsm8k" / "test.jsonl").is_file()
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


@pytest.fixture
def rlake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., CompletedProcess[str]]:
    """Run commands in an empty folder, whose store is ./lake."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLAKE_STORE", str(tmp_path / "lake"))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args: object) -> CompletedProcess[str]:
        capsys.readouterr()
        words = [str(a) for a in args]
        code = run(words)
        said = capsys.readouterr()
        return CompletedProcess(words, code, said.out, said.err)

    return call


@pytest.fixture
def lake(tmp_path: Path, store: Store) -> Store:
    """Return the store that commands use, with one task in it."""
    Path(store.uri).rename(tmp_path / "lake")
    lake = connect(tmp_path / "lake")
    lake.append("tasks", [Task.ask("2+2=", "4")])
    return lake


@pytest.fixture(
    scope="session", params=["gsm8k" if HAS_DATA else "stand-in for gsm8k, which is absent"]
)
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the GSM8K files; where it is absent, made-up sums of the same shape."""
    if HAS_DATA:
        return DATA / "gsm8k"
    folder = tmp_path_factory.mktemp("gsm8k")
    for name, numbers in (("train", range(60)), ("test", range(100, 120))):
        lines = ({"question": _asked(n), "answer": f"{_sum(n)}\n#### {2 * n}"} for n in numbers)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    solved = [
        {"question": _asked(n), "ground_truth": f"A: {2 * n}"}
        | {
            model: {"is_correct": (n + i) % (i + 2) == 0, "solution": f"{_sum(n)} {model}"}
            for i, model in enumerate(MODELS)
        }
        for n in range(100, 120)
    ]
    (folder / "example_model_solutions.jsonl").write_text(
        "".join(json.dumps(x) + "\n" for x in solved)
    )
    return folder


def _asked(n: int) -> str:
    return f"What\u2019s {n} and {n}?"


def _sum(n: int) -> str:
    return f"{n} + {n} = <<{n}+{n}={2 * n}>>{2 * n}"

"""The command line as a fixture."""

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from rlake.loop.cli import run_command
from rlake.store import Store, Task, connect


@pytest.fixture
def rlake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., CompletedProcess[str]]:
    """Run commands in an empty folder, whose store is ./lake."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLAKE_STORE", str(tmp_path / "lake"))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args: object, stdin: str | None = None) -> CompletedProcess[str]:
        capsys.readouterr()
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", StringIO(stdin))
        words = [str(a) for a in args]
        code = run_command(words)
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

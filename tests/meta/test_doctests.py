"""Every `>>>` example of the package runs and prints what it says."""

import doctest
import shutil
from importlib import import_module
from pathlib import Path

import pytest

import rlake
from rlake.store import Task
from rlake.store.errors import MissingExtraError

OPTIONAL = {"data_juicer", "fastapi", "ray", "uvicorn", "vllm"}

ROOT = Path(rlake.__path__[0])
# Imported by name, not by path: a path would load each file a second time, under another name.
MODULES = [
    ".".join(("rlake", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for folder in ("store", "operators", "pipelines", "loop")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.fixture(scope="module")
def with_a_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store that holds one task, to be copied."""
    store = rlake.connect(folder := tmp_path_factory.mktemp("doctests") / "store")
    store.append("tasks", [Task.ask("2+2=", "4")])
    return folder


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_hold(
    name: str, tmp_path: Path, with_a_task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        module = import_module(name)
    except ImportError as error:
        if isinstance(error, MissingExtraError) or error.name in OPTIONAL:
            pytest.skip(f"needs an extra: {error}")
        raise
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for number, example in enumerate(doctest.DocTestFinder(exclude_empty=True).find(module)):
        if example.examples:
            # Each docstring finds an empty folder `tmp`, and a `store` that holds one task.
            tmp = tmp_path / str(number)
            tmp.mkdir()
            example.globs |= {"tmp": tmp, "Task": Task}
            if any("store" in line.source for line in example.examples):
                shutil.copytree(with_a_task, tmp / "store")
                example.globs["store"] = rlake.connect(tmp / "store")
            runner.run(example)
    assert runner.summarize(verbose=False).failed == 0

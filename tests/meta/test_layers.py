"""The arrow `store <- operators <- pipelines <- loop`, proved over the syntax of every file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("store", "operators", "pipelines", "loop")
VAGUE = ("utils", "helpers", "common", "manager", "handler")


def modules(root: Path) -> list[Path]:
    return sorted(path for layer in LAYERS for path in (root / layer).rglob("*.py"))


def imported(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, full module name) of each import in a file, relative ones as `rlake.*`."""
    here = ["rlake", *path.relative_to(root).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, name.name) for name in names)
            case ast.ImportFrom(module=module, names=names, level=0):
                yield node.lineno, module or ""
            case ast.ImportFrom(module=module, names=names, level=level):
                base = here[: len(here) - level + 1] + (module.split(".") if module else [])
                yield from ((node.lineno, ".".join([*base, name.name])) for name in names)
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]) if ast.unparse(
                func
            ).rsplit(".")[-1] in ("import_module", "__import__"):
                dots = len(name) - len(name.lstrip("."))
                base = here[: len(here) - dots + 1] if dots else []
                yield node.lineno, ".".join([*base, name[dots:]])


def absolute_imports(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                tops = {name.name.split(".")[0] for name in names}
            case ast.ImportFrom(module=str(module), level=0):
                tops = {module.split(".")[0]}
            case _:
                continue
        if tops & {"rlake", *LAYERS}:
            yield node.lineno


def violations(root: Path) -> list[str]:
    found: list[str] = []
    for path in modules(root):
        name = str(path.relative_to(root))
        own = LAYERS.index(path.relative_to(root).parts[0])
        for line, module in imported(path, root):
            parts = module.split(".")
            if parts[0] != "rlake":
                continue
            if len(parts) == 1 or parts[1] not in LAYERS:
                found.append(f"{name}:{line} imports from the root; name the folder it is in")
            elif LAYERS.index(parts[1]) > own:
                found.append(f"{name}:{line} `{LAYERS[own]}` imports `{parts[1]}`, to its right")
        found += [
            f"{name}:{line} imports our own package absolutely" for line in absolute_imports(path)
        ]
        if path.stem in VAGUE or path.stem.startswith("base_"):
            found.append(f"{name} is named after no noun or verb")
    return found


def test_nothing_imports_to_the_right_of_its_layer() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in modules(ROOT)} == set(LAYERS)
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("store/rows.py", "from ..operators import clean", "`store` imports `operators`"),
        ("store/rows.py", "from .. import loop", "`store` imports `loop`"),
        ("store/deep/rows.py", "from ...loop.cli import main", "`store` imports `loop`"),
        (
            "operators/clean.py",
            "def f():\n    from ..pipelines import Pipeline",
            "`operators` imports `pipelines`",
        ),
        (
            "pipelines/run.py",
            "if TYPE_CHECKING:\n    from ..loop import Trainer",
            "`pipelines` imports `loop`",
        ),
        (
            "pipelines/run.py",
            "import_module('..loop.trainer', __package__)",
            "`pipelines` imports `loop`",
        ),
        ("store/rows.py", "importlib.import_module('rlake.loop')", "`store` imports `loop`"),
        ("loop/trainer.py", "import rlake", "absolutely"),
        ("loop/trainer.py", "from rlake.store import Store", "absolutely"),
        ("loop/trainer.py", "from store import Store", "absolutely"),
        ("loop/trainer.py", "from .. import Store", "from the root"),
        ("loop/utils.py", "", "no noun or verb"),
        ("operators/base_filter.py", "", "no noun or verb"),
    ],
)
def test_a_planted_violation_is_caught(
    tmp_path: Path, file: str, source: str, expected: str
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source, encoding="utf-8")
    assert [message for message in violations(tmp_path) if expected in message]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("loop/cli/main.py", "from ...store import Store\nfrom ..trainer import Trainer"),
        (
            "loop/trainer.py",
            "from ..pipelines import Pipeline\nfrom . import sampler\nimport torch",
        ),
        ("operators/clean.py", "from .. import store\nimport polars as pl"),
        ("store/__init__.py", "from .schema import TASKS\nimport_module('.rows', __name__)"),
    ],
)
def test_an_import_to_the_left_is_allowed(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source, encoding="utf-8")
    assert violations(tmp_path) == []

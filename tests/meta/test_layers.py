"""Who may import whom, proved over the syntax of every file.

The arrow `store <- operators <- pipelines <- loop`; inside `loop`, rooms with ranks, each of which
imports only what is below it; and no two files that import each other in a circle. Imports under
TYPE_CHECKING and inside functions count.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("store", "operators", "pipelines", "loop")
RANK = {
    "audits": 0,
    "config": 0,
    "losses": 0,
    "labeling": 0,
    "models": 1,
    "algorithms": 1,
    "schedule": 1,
    "runs": 1,
    "tinker_api": 1,
    "inference": 2,
    "weight_sync": 2,
    "trajectories": 3,
    "trainer": 3,
    "chat_api": 4,
    "environments": 4,
    "workflows": 5,
    "tasks": 5,
    "rollouts": 6,
    "recipes": 6,
    "evaluation": 7,
    "serving": 7,
    "explorer": 8,
    "run": 9,
    "report": 9,
    "stages": 10,
    "api": 11,  # the public functions: they call every job
    "selftest": 11,
    "studio": 11,
    "cli": 12,
}
"""How high each file and folder directly in `loop` lies; it imports only lower ones."""
FORBIDDEN = {("explorer", "trainer"), ("trainer", "inference"), ("serving", "trainer")}
"""Rooms that meet in the store alone, whatever their ranks allow."""
TOYS = "loop/recipes/toys/"
"""What recipes name in full; no product code imports it."""
VAGUE = ("utils", "helpers", "common", "manager", "handler")


def modules(root: Path) -> list[Path]:
    return sorted(path for layer in LAYERS for path in (root / layer).rglob("*.py"))


@cache  # reading all files takes seconds, and several tests walk over them
def nodes(path: Path) -> list[ast.AST]:
    return [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)
    ]


def imported(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, full module name) of each import in a file, relative ones as `rlake.*`."""
    here = ["rlake", *path.relative_to(root).parent.parts]
    for node in nodes(path):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, name.name) for name in names)
            case ast.ImportFrom(module=module, names=names, level=0):
                yield node.lineno, module or ""
            case ast.ImportFrom(module=module, names=names, level=level):
                base = here[: len(here) - level + 1] + (module.split(".") if module else [])
                yield from ((node.lineno, ".".join([*base, name.name])) for name in names)
            case ast.Call(func=ast.Name(id="heavy"), args=[ast.Constant(value=str(name)), *_]):
                yield node.lineno, f"rlake.loop.{name}"  # as `heavy` of the command line does
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]) if ast.unparse(
                func
            ).rsplit(".")[-1] in ("import_module", "__import__"):
                dots = len(name) - len(name.lstrip("."))
                base = here[: len(here) - dots + 1] if dots else []
                yield node.lineno, ".".join([*base, name[dots:]])


def absolute_imports(path: Path) -> Iterator[int]:
    for node in nodes(path):
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
        ("pipelines/run.py", "heavy('trainer.trainer')", "`pipelines` imports `loop`"),
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


def edges(root: Path, *layers: str) -> dict[str, set[str]]:
    """Return which files each file of some layers imports, by their paths."""
    known = {
        str(path.relative_to(root)) for layer in layers for path in (root / layer).rglob("*.py")
    }
    return {file: _files(root / file, root, known) - {file} for file in sorted(known)}


def _files(path: Path, root: Path, known: set[str]) -> set[str]:
    return {file for _, name in imported(path, root) if (file := _file(name, known))}


def _file(module: str, known: set[str]) -> str | None:
    """Return the file that an imported name is in: a module, or a name of one or of a package."""
    parts = module.split(".")[1:]
    while parts:
        for file in ("/".join(parts) + ".py", "/".join([*parts, "__init__.py"])):
            if file in known:
                return file
        parts.pop()
    return None


def room(file: str) -> str:
    return file.split("/")[1].removesuffix(".py")


def upward(root: Path) -> list[tuple[str, str]]:
    """Return the imports between files of `loop` that the ranks of their rooms do not allow."""
    found: list[tuple[str, str]] = []
    for source, targets in edges(root, "loop").items():
        for target in sorted(targets):
            a, b = room(source), room(target)
            if a == b or "__init__" in (a, b):
                continue
            is_toy = target.startswith(TOYS) and a not in ("recipes", "selftest")
            if RANK[b] >= RANK[a] or (a, b) in FORBIDDEN or a == "labeling" or is_toy:
                found.append((source, target))
    return found


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of files that reach each other.

    The names of a package are loaded lazily or first, so its `__init__.py` is no part of a circle.
    """
    left = {
        file: {other for other in others if not other.endswith("__init__.py")}
        for file, others in imports.items()
        if not file.endswith("__init__.py")
    }
    reach: dict[str, set[str]] = {}
    for file in left:
        seen, ahead = set[str](), [file]
        while ahead:
            new = left[ahead.pop()] - seen
            seen |= new
            ahead += new
        reach[file] = seen
    groups = {frozenset(o for o in reach[f] if f in reach[o]) for f in left if f in reach[f]}
    return sorted(sorted(group) for group in groups)


def test_rooms_of_loop_import_downwards_only() -> None:
    rooms = {room(file) for file in edges(ROOT, "loop")} - {"__init__"}
    assert rooms == set(RANK), "RANK lists each room, and no other"
    assert upward(ROOT) == []


def test_what_commands_load_by_name_exists() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "loop" / "cli").glob("*.py"))
    named = re.findall(r'\bheavy\("([\w.]+)"', text)
    known = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules(ROOT)}
    assert len(named) == len(re.findall(r"\bheavy\(", text)) - 1  # all but its definition
    assert {n for n in named if not {f"loop.{n}", f"loop.{n}.__init__"} & known} == set()


def test_no_two_files_import_each_other_in_a_circle() -> None:
    assert circles(edges(ROOT, *LAYERS)) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("loop/config/base.py", "from ..models.load import load"),
        ("loop/models/load.py", "from ..algorithms.grpo import GRPO"),
        ("loop/trainer/step.py", "def f():\n    from ..inference.policy import Policy"),
        (
            "loop/explorer/batched.py",
            "if TYPE_CHECKING:\n    from ..trainer.trainer import Trainer",
        ),
        ("loop/serving/server.py", "from ..trainer import trainer"),
        ("loop/labeling/queue.py", "from ..config.base import Settings"),
        ("loop/cli/show.py", "from ..recipes.toys.sums import addition"),
        ("loop/runs/job.py", "heavy('trainer.trainer')"),
    ],
)
def test_a_planted_import_upwards_is_caught(tmp_path: Path, file: str, source: str) -> None:
    names = ("config/base", "models/load", "algorithms/grpo", "inference/policy", "trainer/step")
    names += ("trainer/trainer", "explorer/batched", "recipes/toys/sums")
    for name in names:
        path = tmp_path / "loop" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(source, encoding="utf-8")
    assert [source for source, _ in upward(tmp_path)] == [file]


def test_a_planted_circle_is_caught(tmp_path: Path) -> None:
    files = {"a": "from .b import x", "b": "def f():\n    from .c import x", "c": "from . import a"}
    for name, source in files.items():
        path = tmp_path / "loop" / "runs" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    assert circles(edges(tmp_path, "loop")) == [[f"loop/runs/{name}.py" for name in "abc"]]

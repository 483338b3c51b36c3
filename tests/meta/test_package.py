"""The repository's root is the package: what is in the tree is in the wheel, and nothing twice."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import rlake

ROOT = Path(__file__).parents[2]
FOLDERS = ("store", "operators", "pipelines", "loop")
SHIPPED = {".css", ".html", ".js", ".py", ".sql", ".yaml"}


def shipped() -> Iterator[Path]:
    """Yield the path, below the root, of each file that a user must get."""
    yield Path("__init__.py")
    yield Path("algorithms.py")
    yield Path("recipes.py")
    yield Path("py.typed")
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SHIPPED:
                yield path.relative_to(ROOT)


def test_every_folder_with_a_shipped_file_is_a_package() -> None:
    folders = {path.parent for path in shipped()} - {Path()}
    assert [str(folder) for folder in folders if not (ROOT / folder / "__init__.py").exists()] == []


FOR_OTHERS = {
    "aiohttp": "Data-Juicer imports it without requiring it",
    "ftfy": "Data-Juicer's operators on text",
    "py-data-juicer": "imported as data_juicer",
    "pylance": "imported as lance",
    "pytz": "DuckDB makes Python times with it",
    "pyyaml": "imported as yaml",
    "ray": "`ray[data]`, imported as ray",
    "scipy": "Data-Juicer's operators on text",
    "selectolax": "Data-Juicer's operators on text",
    "mlflow-skinny": "imported as mlflow",
    "vllm": "imported by the process of the engine",
}
"""Requirements that are not imported by their own names, and why they are there."""
_IMPORT = r"(?:import|from) {0}\b|\"{0}[\".]"


def test_no_extra_installs_what_is_not_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"]]
    needed += [one for name, all_of in extras.items() if name != "dev" for one in all_of]
    names = {re.split(r"[^\w-]", one, maxsplit=1)[0] for one in needed} - {"rlake", *FOR_OTHERS}
    source = "\n".join(
        (ROOT / path).read_text(encoding="utf-8") for path in shipped() if path.suffix == ".py"
    )
    used = {n for n in names if re.search(_IMPORT.format(n.replace("-", "_")), source)}
    assert names - used == set()


def test_every_extra_that_a_message_or_a_document_names_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    documents = [*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "docs").glob("*.md")]
    sources = [ROOT / path for path in shipped() if path.suffix == ".py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in (*sources, *documents))
    listed = re.findall(r"rlake\[([\w,-]+)\]", text)
    named = {name for names in listed for name in names.split(",")}
    named |= set(re.findall(r"missing_extra\(.*?, \"([\w-]+)\"\)", text))
    assert named <= extras
    assert named >= extras - {"dev"}, "an extra that nothing names"


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    tree = tmp_path / "tree"  # built in a copy: setuptools leaves build/ behind
    tree.mkdir()
    named = ("__init__.py", "algorithms.py", "recipes.py", "py.typed", "LICENSE", "README.md")
    for name in ("pyproject.toml", "setup.py", *named):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-q", "-w", tmp_path, tree], check=True)
    (wheel,) = tmp_path.glob("rlake-*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {f"rlake/{path.as_posix()}" for path in shipped()}


def test_every_public_name_is_importable() -> None:
    missing = [name for name in rlake.__all__ if getattr(rlake, name, None) is None]
    assert missing == []
    assert set(rlake.__all__) <= set(dir(rlake))


def test_a_type_checker_sees_the_same_public_names() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: f".{node.module}" if node.module else ""
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = rlake._HOME.items()  # pyright: ignore[reportPrivateUsage]
    assert seen == {name: home.removesuffix(f".{name}") for name, home in homes}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module `rlake` has no attribute `stor`"):
        _ = rlake.stor  # pyright: ignore[reportAttributeAccessIssue]


def test_no_module_is_loaded_under_two_names() -> None:
    for folder in FOLDERS:
        import_module(f"rlake.{folder}")
    ours = [ROOT / folder for folder in FOLDERS]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and any(Path(file).is_relative_to(folder) for folder in ours):
            assert name.startswith("rlake."), f"`{file}` is loaded as `{name}`"

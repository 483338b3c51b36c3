"""What `import rlake` and `rlake --help` may load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlake.loop.cli.commands import MODULE_OF
from rlake.loop.cli.program import runnable
from rlake.store import connect

# pandas is not among them: pyarrow loads it by itself wherever it is installed
HEAVY = {"torch", "transformers", "vllm", "ray", "data_juicer", "matplotlib", "httpx", "lancedb"}

RLAKE = """
sys.argv = ["rlake", {words}]
from rlake.loop.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
"""
HELP = RLAKE.format(words="'--help'")


def loaded_by(code: str, cwd: Path) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after running `code`."""
    report = "import json\nprint(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\n{report}"],
        cwd=cwd,  # away from the repository, as a user would be
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    ["import rlake\nrlake.connect('lake')", HELP],  # each imports before it works
    ids=["rlake.connect", "rlake --help"],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(code: str, tmp_path: Path) -> None:
    assert loaded_by(code, tmp_path) & HEAVY == set()


def test_a_heavy_import_would_be_seen(tmp_path: Path) -> None:
    assert loaded_by("import rlake, matplotlib", tmp_path) & HEAVY == {"matplotlib"}


def test_import_rlake_loads_none_of_its_folders(tmp_path: Path) -> None:
    code = "import rlake\nassert not [name for name in sys.modules if name.startswith('rlake.')]"
    loaded_by(code, tmp_path)


@pytest.mark.parametrize("words", ["'sql', 'SELECT 1', '--json'", "'tables'"])
def test_a_question_loads_its_own_command_and_no_frames(words: str, tmp_path: Path) -> None:
    connect(tmp_path / "lake")
    seen = """
unneeded = "rlake.loop.cli.run", "rlake.loop.config", "rlake.store.files", "polars", "pandas"
assert not set(unneeded) & set(sys.modules), set(unneeded) & set(sys.modules)
import pandas, pyarrow as pa
assert pa.table({"n": [1]}).to_pandas().n[0] == 1  # hidden from pyarrow, and only from it
"""
    loaded_by(RLAKE.format(words=words) + seen, tmp_path)


def test_a_command_is_in_the_module_that_is_loaded_for_it() -> None:
    root = runnable()
    assert set(root.commands) == set(MODULE_OF)
    for name, command in root.commands.items():
        inner = getattr(command, "commands", {"": command})
        homes = {one.callback.__module__.rpartition(".")[2] for one in inner.values()}
        assert homes == {MODULE_OF[name]}, name

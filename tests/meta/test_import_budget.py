"""What `import rlake` and `rlake --help` may load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# pandas is not among them: pyarrow loads it by itself wherever it is installed
HEAVY = {"torch", "transformers", "vllm", "ray", "data_juicer", "matplotlib", "httpx", "lancedb"}

HELP = """
sys.argv = ["rlake", "--help"]
from rlake.loop.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
"""


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

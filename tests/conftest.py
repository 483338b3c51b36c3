import gc
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import rlake
from rlake.loop.recipes.gsm8k import find, real
from rlake.store import Store

if (DATA := Path(__file__).parents[2] / "shared" / "data").is_dir():
    # before the parameters of `gsm8k` below are worked out; commands of tests inherit it
    os.environ.setdefault("RLAKE_DATA", str(DATA))
MEMORY = Path("/dev/shm")
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    # A store is a hundred small files: a disk takes longer to make and remove them than most tests
    # take otherwise. Processes of tests inherit it.
    os.environ.setdefault("TMPDIR", str(MEMORY))
    tempfile.tempdir = None
# Collection only adds objects that stay: half of Python's time in it went into looking for others.
gc.disable()
# The same examples in each run, on a slow machine too; `--hypothesis-profile=default`: others.
settings.register_profile(
    "steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")
TIERS = {
    "slow": "make test-slow",
    "long": "make test-long",
    "gpu": ".venv/bin/pytest -m gpu (on a machine with CUDA)",
}
"""What runs the tests that the default selection leaves out."""


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is long or alone is slow too, so that no such test is in the default tier."""
    for item in items:
        if {"long", "alone"} & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Leave what was imported so far out of garbage collections, which walked it in every test."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what was not run, why, and which command runs it."""
    left_out = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    chosen = str(config.getoption("markexpr"))
    tiers = [name for name in TIERS if f"not {name}" in chosen]
    if "not slow" in chosen:  # long ones are slow, too
        tiers.insert(1, "long")
    if left_out or tiers:
        terminalreporter.section("not run here")
    for reason, count in sorted(left_out.items()):
        terminalreporter.write_line(f"{count} skipped: {reason}")
    for name in tiers:
        terminalreporter.write_line(f"tests marked `{name}`: {TIERS[name]}")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store without rows, to be copied: making one is slower."""
    folder = tmp_path_factory.mktemp("empty") / "store"
    rlake.connect(folder)
    return folder


@pytest.fixture
def store(tmp_path: Path, empty_store: Path) -> Store:
    """An open store without rows."""
    shutil.copytree(empty_store, tmp_path / "store")
    return rlake.connect(tmp_path / "store")


@pytest.fixture(
    scope="session", params=["gsm8k" if real() else "stand-in for gsm8k, which is absent"]
)
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the GSM8K files; where they are absent, of generated ones of the same shape."""
    return find(tmp_path_factory.mktemp("gsm8k")).folder

import shutil
from pathlib import Path

import pytest

import rlake
from rlake.loop.gsm8k import find, real
from rlake.store import Store


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

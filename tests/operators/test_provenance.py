"""The digest of a function tells whether its source was changed."""

import linecache
import operator
from functools import partial
from importlib import import_module, reload
from pathlib import Path

import pytest

from rlake.operators import rewards
from rlake.operators.source_digest import digest


class Longer:
    """A reward that is an object."""

    def __call__(self, task: object, experience: object) -> float:
        return 1.0


def test_a_changed_source_is_another_digest_and_a_changed_neighbor_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    mine = "def mine(task, experience):\n    return {}\n"
    file = tmp_path / "rewards_of_a_user.py"
    digests = []
    for text in (mine.format(1.0), f"# moved\n{mine.format(1.0)}", mine.format(22.0)):
        file.write_text(text)
        linecache.clearcache()
        digests.append(digest(reload(import_module("rewards_of_a_user")).mine))
    assert digests[0] == digests[1] != digests[2]


def test_functions_without_a_source_and_objects_have_a_digest_too() -> None:
    made = [digest(f) for f in (operator.add, operator.sub, Longer(), rewards.exact_match)]
    assert len(set(made)) == 4
    assert digest(Longer()) == digest(Longer())


def test_arguments_that_are_filled_in_count() -> None:
    made = {digest(partial(max, n)) for n in (1, 2, 1)}
    assert len(made) == 2

"""Commands of the program in tests: their type, and what they print."""

import json
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

Command = Callable[..., CompletedProcess[str]]
"""The fixture `rlake`: it runs a command in the folder of the test."""


def last_json(said: CompletedProcess[str]) -> dict[str, Any]:
    """The object that a command with `--json` prints as its last line."""
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout.splitlines()[-1])


def refused(said: CompletedProcess[str], *words: str, code: int = 2) -> str:
    """One line on stderr that holds all words, nothing on stdout, and the exit code."""
    assert (said.returncode, said.stdout) == (code, ""), said
    assert said.stderr.startswith("error: ")
    assert said.stderr.count("\n") == 1
    for word in words:
        assert word in said.stderr
    return said.stderr

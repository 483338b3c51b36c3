"""Whatever commands and configurations are given, a line says what is wrong: no traceback."""

import json
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from support.builders import experiences, task

from rlake.loop import cli
from rlake.loop.cli.program import runnable
from rlake.loop.config import RunConfig, build
from rlake.store import connect
from rlake.store.errors import RlakeError

WORDS = (
    "",
    " ",
    "-1",
    "a\nb",
    "x" * 5000,
    "a/" * 2500,
    "../../x",
    "/dev/null",
    "/proc/1/x",
    "~nosuch/x",
    "./x.py:f",
    "os:path",
    "'; DROP TABLE tasks; --",
    "(" * 500,
    "reward ++",
    "nan",
    "9" * 5000,
    "1e999",
    "{exact_match: .nan}",
    "[" * 3000,
    "&a [*a]",
    "\\ud800",
    "\u202e😀",
    "s3://",
    "null",
)
"""Texts that somebody, or a program, may hand to a command."""
VALUES: tuple[Any, ...] = (
    *WORDS,
    math.nan,
    math.inf,
    -(10**30),
    10**4000,
    0,
    True,
    [],
    [[1]],
    {},
    {"": None},
    {"x" * 3000: {"y": [math.nan]}},
    [None] * 3000,
)
STARTS = {"quickstart", "serve", "label", "selftest", "watch"}
"""Commands that would begin to work or to wait."""

CONFIG = {"name": "demo", "model": {"from_scratch": {}}, "algorithm": "sft"}


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the words of each command with its parameters."""

    def walk(one: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        if hasattr(one, "commands"):
            for name, inner in one.commands.items():
                yield from walk(inner, (*words, name))
        elif words[-1] not in STARTS:
            yield words, one.params

    yield from walk(runnable(), ())


COMMANDS = sorted(commands(), key=lambda pair: pair[0])


def sections(kind: Any) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from sections(part)


def keys(section: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each key of the configuration's tree."""
    for name, field in section.model_fields.items():
        yield (*path, name)
        for inner in sections(field.annotation):
            if len(path) < 4:
                yield from keys(inner, (*path, name))


KEYS = sorted(set(keys(RunConfig)))


def refusal(tree: dict[str, Any]) -> str:
    """Return what is said of a configuration that is refused."""
    try:
        build(tree)
    except RlakeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("section", sorted({path[0] for path in KEYS}))
def test_every_key_of_a_configuration_takes_or_refuses_what_it_is_given(section: str) -> None:
    of_section = [path for path in KEYS if path[0] == section]
    for path, value in product(of_section, VALUES):
        tree = json.loads(json.dumps(CONFIG))
        *parents, last = path
        node = tree
        for parent in parents:
            node[parent] = node = node.get(parent) or {}
        node[last] = value
        assert len(refusal(tree)) < 6000, path  # a name of 5,000 letters is said


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    lake = connect(folder / "lake")
    lake.append("tasks", [task(0)])
    lake.append("experiences", experiences(4, reward=1.0))
    return folder


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_command_takes_or_refuses_what_it_is_given(
    place: Path,
    data: st.DataObject,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("RLAKE_STORE", str(place / "lake"))
    words, params = data.draw(st.sampled_from(COMMANDS))
    args = list(words)
    for param in params:
        value = data.draw(st.sampled_from(WORDS))
        if param.param_type_name == "argument":
            args.append(value)
        elif param.required or data.draw(st.integers(0, 5)) == 0:
            args += [param.opts[0], *([] if getattr(param, "is_flag", False) else [value])]
    code = cli.run_command(args)
    said = capsys.readouterr()
    assert code in (cli.DONE, cli.FAILED, cli.MISUSED), args
    assert "mistake in rlake" not in said.err, (args, said.err)
    assert len(said.err) < 20_000, args

"""Every fenced block of the README and the site: Python, shell, SQL and YAML run as they stand.

A page is one session, from top to bottom, in an empty folder: its Python blocks share their names,
and a block that begins with `# file: NAME` is written to that file first. Blocks marked `text`
are not run (they need a network, a server or an id); their commands are checked for their options.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from jsonschema.validators import validator_for

import rlake
from rlake.loop import config
from rlake.loop.cli.program import runnable
from rlake.loop.config.json_schema import json_schema
from rlake.pipelines import Pipeline

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
LANGUAGES = {"python", "bash", "sql", "yaml", "text"}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def of(*languages: str) -> list[Any]:
    """Return the blocks of some languages as parameters, each with a name to find it by."""
    return [
        pytest.param(text, id=f"{page}-{number}")
        for page in PAGES
        for number, (language, text) in enumerate(blocks(page))
        if language in languages
    ]


@cache
def editor() -> Any:
    """What editors check configurations with; making and checking it takes a fifth of a second."""
    kind = validator_for(schema := json_schema())
    kind.check_schema(schema)
    return kind(schema)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_its_language(page: str) -> None:
    assert {language for language, _ in blocks(page)} <= LANGUAGES


@pytest.mark.parametrize("text", of("python"))
def test_python_is_valid(text: str) -> None:
    compile(text, "block", "exec")


@pytest.mark.parametrize("text", of("sql"))
def test_sql_runs_over_the_tables_there_are(text: str, tmp_path: Path) -> None:
    rlake.connect(tmp_path / "lake").sql(text).fetchall()


@pytest.mark.parametrize("text", of("yaml"))
def test_yaml_is_a_configuration_or_a_pipeline(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSWORD", "secret")  # which a block names
    tree = yaml.safe_load(text)
    if "source" in tree:
        assert Pipeline.from_yaml(text).operators
        return
    editor().validate(tree)
    path = tmp_path / "block.yaml"
    path.write_text(yaml.safe_dump({"extends": "grpo_digits", "name": "block"} | tree))
    if "stages" in tree:
        assert config.load_stages(path)
    else:
        assert config.load(path).name


@pytest.mark.parametrize("name", config.recipes())
def test_the_json_schema_takes_every_recipe(name: str) -> None:
    text = (ROOT / "loop" / "recipes" / f"{name}.yaml").read_text()
    # editors read YAML 1.2, in which 3e-3 is a number
    tree = yaml.safe_load(re.sub(r"(?<=: )(\d+)e(?=-)", r"\1.0e", text))
    editor().validate(tree)


def test_the_json_schema_refuses_an_unknown_key() -> None:
    with pytest.raises(jsonschema.ValidationError, match="'stepz' was unexpected"):
        editor().validate({"trainer": {"stepz": 1}})


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each `rlake` command of a block."""
    lines = text.replace("\\\n", " ").splitlines()
    for line in (line for line in lines if line.isascii()):  # a picture is no command
        words = shlex.split(line, comments=True)
        starts = [i for i, word in enumerate(words) if word == "rlake"]
        if starts and (starts[0] == 0 or "=" in words[0]):
            yield [word for word in words[starts[0] + 1 :] if word not in ("&", "&&", ">")]


@pytest.mark.parametrize("text", [p for p in of("bash", "text") if any(commands(p.values[0]))])
def test_commands_have_the_options_that_they_are_given(text: str) -> None:
    root: Any = runnable()
    for words in commands(text):
        command, context = root, root.make_context("rlake", list(words))
        while hasattr(command, "commands"):
            rest = [*context._protected_args, *context.args]
            _, command, rest = command.resolve_command(context, rest)
            context = command.make_context(command.name, rest, parent=context)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(language in ("python", "bash") for language, _ in blocks(p))]
)
def test_a_page_runs_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    script = ["namespace = {'__name__': 'page'}", "import subprocess"]
    script.append("from rlake.loop.cli import run_command")
    for number, (language, text) in enumerate(blocks(page)):
        path = re.match(r"# file: (\S+)\n", text)
        if path:
            (tmp_path / path[1]).write_text(text)
        if language == "python":
            (tmp_path / f"block_{number}.py").write_text(text)
            name = f"block_{number}.py"
            script.append(f"exec(compile(open({name!r}).read(), {name!r}, 'exec'), namespace)")
        elif language == "bash" and not re.search(r"^(?!rlake )| [&|<>]|\\\n", text[:-1], re.M):
            script += [f"assert run_command({words!r}) == 0" for words in commands(text)]
        elif language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", text]
            script.append(f"subprocess.run({command!r}, check=True)")
    (tmp_path / "page.py").write_text("\n".join(script))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_site_builds_without_a_warning() -> None:
    done = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert (ROOT / "build" / "site" / "reference" / "configuration" / "index.html").exists()

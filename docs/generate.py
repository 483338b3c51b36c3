"""Generate the site's reference pages from the code, and a page of each notebook.

MkDocs calls `on_files` (`hooks` in mkdocs.yml). Nothing here is written by hand, so that a page
cannot say other than what the code does.
"""

import inspect
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from fenced_examples import fenced  # MkDocs puts this folder on the path
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import rlake
from rlake.loop import workflows
from rlake.loop.algorithms import names
from rlake.loop.cli.algorithms import Description, describe
from rlake.loop.cli.app import PANELS
from rlake.loop.cli.program import runnable
from rlake.loop.cli.tables import parameters_of
from rlake.loop.config.json_schema import json_schema
from rlake.operators import rewards
from rlake.operators.import_path import public_functions
from rlake.operators.kinds import Kind
from rlake.operators.resolve import public
from rlake.operators.reward_protocol import looks_at
from rlake.store.query import views_sql
from rlake.store.schema import TABLES

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NOTE = "*Generated from the code.*\n\n"


def on_startup(command: str, dirty: bool) -> None:  # noqa: FBT001  MkDocs passes both
    """Give mkdocstrings a folder that holds the package and nothing else.

    The root is the package and holds .venv, which mkdocstrings would read for minutes; links to
    the folders it does not follow.
    """
    del command, dirty
    package = ROOT / "build" / "package" / "rlake"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for name in ("__init__.py", "algorithms.py", "recipes.py"):
        shutil.copy(ROOT / name, package)
    for name in ("store", "operators", "pipelines", "loop"):
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))


def on_config(config: MkDocsConfig) -> None:
    """List the notebooks in the navigation."""
    for entry in config.nav or []:
        if "Notebooks" in entry:
            entry["Notebooks"] = ["notebooks/index.md", *(page_of(path) for path in NOTEBOOKS)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those of the folder."""
    for path, text in pages():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the Markdown of each generated page."""
    yield "reference/cli.md", command_line()
    yield "reference/configuration.md", configuration()
    yield "reference/tables.md", tables()
    yield "reference/operators.md", operators()
    yield "reference/rewards.md", functions("Rewards", rewards, reward_form)
    yield "reference/workflows.md", functions("Workflows", workflows, lambda _: "")
    yield "reference/algorithms.md", algorithms()
    yield "reference/python.md", python()
    yield "notebooks/index.md", notebooks()
    for path in NOTEBOOKS:
        yield page_of(path), notebook(path)
    yield "changelog.md", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    yield "contributing.md", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


# Markdown


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table; cells are Markdown, and stay on one line."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell(c) for c in line)} |" for line in lines) + "\n\n"


def cell(text: str) -> str:
    """Return a text as it stands in a table: on one line, without the sign between cells."""
    return " ".join(text.split()).replace("|", "\\|")


def docstring(text: str | None) -> str:
    """Return a docstring as Markdown: its examples and indented lines become code."""
    return fenced(inspect.cleandoc(text or ""))


def signature(name: str, function: Callable[..., Any], skipped: int = 0) -> str:
    """Return a call with its parameters, as Python prints them, in a block."""
    packages = re.compile(r"\b(?:collections\.abc|typing|rlake[\w.]*)\.")
    found = parameters_of(function, skip=skipped)
    text = ", ".join(f"{name}: {packages.sub('', kind)}" for name, kind in found.items())
    return f"```text\n{name}({text})\n```\n\n"


# The command line


def command_line() -> str:
    """Return the page of all commands, in the order and under the headings of `rlake --help`."""
    root: Any = runnable()
    text = f"# Command line\n\n{NOTE}{root.help}\n\n"
    for panel in PANELS:
        text += f"## {panel}\n\n"
        for name, command in root.commands.items():
            if command.rich_help_panel == panel:
                text += commands(f"rlake {name}", command)
    return text


def commands(name: str, command: Any) -> str:
    """Return the section of a command, or those of a group's commands."""
    if children := getattr(command, "commands", None):
        return "".join(commands(f"{name} {child}", one) for child, one in children.items())
    own = [p for p in command.params if p.name != "help" and not p.hidden]
    arguments = [p for p in own if not p.opts[0].startswith("-")]
    usage = " ".join([name, *(argument(p) for p in arguments), "[OPTIONS]"])
    text = f"### {name}\n\n{docstring(command.help)}\n\n```text\n{usage}\n```\n\n"
    rows = [(f"`{written(p)}`", p.help or "", default_of(p)) for p in own]
    return text + (table(("argument or option", "meaning", "default"), rows) if rows else "")


def argument(parameter: Any) -> str:
    """Return an argument as it stands in a usage line."""
    name = (parameter.metavar or parameter.name).upper() + ("..." if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def written(parameter: Any) -> str:
    """Return how an option is written, or the name of an argument."""
    if not parameter.opts[0].startswith("-"):
        return argument(parameter)
    flags = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return flags if parameter.is_flag else f"{flags} {parameter.metavar or parameter.name.upper()}"


def default_of(parameter: Any) -> str:
    """Return a parameter's default, where it has one that says something."""
    value = parameter.default
    shown = value not in (None, False, (), []) and parameter.show_default and not callable(value)
    return f"`{value}`" if shown else ("required" if parameter.required else "")


# Configuration


def configuration() -> str:
    """Return the page of every key, by the JSON Schema that `rlake config schema` prints."""
    schema = json_schema()
    text = (
        f"# Configuration\n\n{NOTE}A configuration is a YAML file or a `RunConfig`. Unknown keys "
        "are refused. `--set a.b=c` overrides one key, and `extends: NAME` merges a file over a "
        "recipe or another file.\n\nSave the JSON Schema with `rlake config schema > rlake.json` "
        "and begin a file with `# yaml-language-server: $schema=rlake.json`: editors then complete "
        "keys and show their meaning.\n\n## The whole file\n\n"
    )
    seen: dict[str, str] = {}
    return text + "".join(section("", schema, schema["$defs"], seen))


def section(path: str, part: Mapping[str, Any], defs: Any, seen: dict[str, str]) -> Iterator[str]:
    """Yield a section and, below it, those of its keys; one that is used twice is written once."""
    if path:
        yield f"## {path}\n\n{docstring(part.get('description'))}\n\n"
    below: list[tuple[str, Mapping[str, Any]]] = []
    rows: list[tuple[str, ...]] = []
    for key, value in part["properties"].items():
        inner = f"{path}.{key}" if path else key
        kinds = []
        for name in types(value):
            found = next((p for p in alternatives(defs.get(name, {})) if "properties" in p), None)
            short = [one for p in alternatives(defs.get(name, {})) for one in types(p)]
            kinds += [one for one in short if one != "object"]
            if found is None:
                kinds += [] if name in defs else [name]
                continue
            if name not in seen:
                place = inner + ".NAME" * ("additionalProperties" in value)
                seen[name] = place
                below.append((place, found))
            kinds.append(f"[{seen[name]}](#{anchor(seen[name])})")
        default = value.get("default", ...)
        shown = "" if default is ... or isinstance(default, dict) else f"`{json.dumps(default)}`"
        meaning = value.get("description", "")
        rows.append((f"`{key}`", " or ".join(dict.fromkeys(kinds)), shown, meaning))
    yield table(("key", "type", "default", "meaning"), rows)
    for place, inner_part in below:
        yield from section(place, inner_part, defs, seen)


def anchor(path: str) -> str:
    """Return the anchor that a heading gets."""
    return path.lower().replace(".", "")


def alternatives(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas of which one holds."""
    return schema.get("anyOf", [schema])


def types(schema: Mapping[str, Any]) -> list[str]:
    """Return the types of a value: names of sections, JSON's types, or the values themselves."""
    found: list[str] = []
    for one in alternatives(schema):
        inner = one.get("additionalProperties")
        if "$ref" in one:
            found.append(one["$ref"].rpartition("/")[2])
        elif "enum" in one:
            found += [f"`{value}`" for value in one["enum"]]
        elif one.get("type") == "array":
            found.append(f"list of {' or '.join(types(one.get('items', {})) or ['values'])}")
        elif isinstance(inner, dict) and "$ref" in json.dumps(inner):
            found += types(inner)
        elif "type" in one:
            found.append("mapping" if one["type"] == "object" else str(one["type"]))
    return found


# Tables


def tables() -> str:
    """Return the page of all tables, views and macros."""
    text = f"# Tables and views\n\n{NOTE}NULL means that a value was not computed.\n\n## Tables\n\n"
    for one in TABLES.values():
        key = ", ".join(f"`{name}`" for name in one.key)
        rows = [
            (f"`{c.name}`", f"`{c.type}`" + ("" if c.required else ", may be NULL"), c.note)
            for c in one.columns
        ]
        text += f"### {one.name}\n\nOne row is {one.row}. Key: {key}.\n\n"
        text += table(("column", "type", "meaning"), rows)
    return text + views()


def views() -> str:
    """Return the views with their columns, and the macros, each with the comment above it."""
    made: dict[str, list[str]] = {"VIEW": [], "MACRO": []}
    pattern = r"((?:^--.*\n)+)CREATE OR REPLACE (VIEW|MACRO) (\w+)(\(.*?\))?"
    with tempfile.TemporaryDirectory() as folder:
        lake = rlake.connect(folder)
        for comment, kind, name, params in re.findall(pattern, views_sql(), re.MULTILINE):
            meaning = " ".join(line.removeprefix("--").strip() for line in comment.splitlines())
            text = f"### {name}{params}\n\n{meaning}\n\n"
            if kind == "VIEW":
                found = lake.sql(f"SELECT * FROM {name} LIMIT 0")
                columns = zip(found.columns, found.types, strict=True)
                text += table(("column", "type"), [(f"`{c}`", f"`{t}`") for c, t in columns])
            made[kind].append(text)
    return f"## Views\n\n{''.join(made['VIEW'])}## Macros\n\n{''.join(made['MACRO'])}"


# Functions


def operators() -> str:
    """Return the page of all operators, by kind."""
    text = (
        f"# Operators\n\n{NOTE}Data-Juicer's operators are used by their own names: "
        "`data_juicer: {text_length_filter: {min_len: 10}}`.\n\n"
    )
    found = sorted(public().items())
    for kind in get_args(Kind):
        text += f"## {kind}\n\n"
        for name, one in found:
            if one.kind == kind:
                text += f"### {name}\n\n{signature(name, one)}{docstring(inspect.getdoc(one))}\n\n"
    return text


def functions(title: str, home: Any, form: Callable[[Any], str]) -> str:
    """Return the page of a module's public functions, which are given two values and parameters."""
    text = f"# {title}\n\n{NOTE}{docstring(home.__doc__)}\n\n"
    for name, one in sorted(public_functions(home).items()):
        text += f"## {name}\n\n{form(one)}{signature(name, one, skipped=2)}"
        text += f"{docstring(inspect.getdoc(one))}\n\n"
    return text


def reward_form(reward: Any) -> str:
    """Say whether a reward judges rollouts one by one."""
    return "Judges the rollouts of a group together.\n\n" if looks_at(reward) == "group" else ""


# Algorithms


def algorithms() -> str:
    """Return the page of all algorithms."""
    found = [describe(name) for name in names()]
    rows = [(f"[{one.name}](#{one.name})", one.summary, drawn(one)) for one in found]
    text = f"# Algorithms\n\n{NOTE}{table(('algorithm', 'what it is', 'draws'), rows)}"
    return text + "".join(algorithm(one) for one in found)


def drawn(one: Description) -> str:
    """Say what an algorithm draws: rows, pairs, or groups of a size."""
    return one.unit if one.group_size in (1, None) else f"{one.unit} of {one.group_size}"


def algorithm(one: Description) -> str:
    """Return the section of an algorithm."""
    text = f"## {one.name}\n\n**{one.title}**\n\n{docstring(one.text)}\n\n"
    rows = [(f"`{p.name}`", p.type, f"`{p.default}`", p.meaning) for p in one.parameters]
    text += table(("parameter", "type", "default", "meaning"), rows) if rows else ""
    metrics = [(f"`train/{name}`", meaning) for name, meaning in one.metrics.items()]
    return text + (table(("metric", "meaning"), metrics) if metrics else "")


# Python


def python() -> str:
    """Return the page of the public names, which mkdocstrings fills."""
    text = f"# Python\n\n{NOTE}"
    for module in ("rlake", "rlake.algorithms", "rlake.pipelines", "rlake.recipes"):
        text += f"## {module}\n\n"
        for name in sorted(public_names(module)):
            text += f"::: {home(module, name)}\n\n"
    return text


def public_names(module: str) -> list[str]:
    """Return the classes and functions that a module lists in `__all__`."""
    found = import_module(module)
    values = ((name, getattr(found, name)) for name in found.__all__)
    return [name for name, value in values if inspect.isclass(value) or inspect.isfunction(value)]


def home(module: str, name: str) -> str:
    """Return where a public name is defined: mkdocstrings reads that file."""
    value = getattr(import_module(module), name)
    return f"{value.__module__}.{value.__name__}"


# Notebooks


def notebooks() -> str:
    """Return the list of all notebooks."""
    lines = [f"- [{title(path)}]({path.stem}.md)" for path in NOTEBOOKS]
    return "# Notebooks\n\nEach runs from top to bottom in the tests.\n\n" + "\n".join(lines) + "\n"


def page_of(path: Path) -> str:
    """Return the path of a notebook's page."""
    return f"notebooks/{path.stem}.md"


def title(path: Path) -> str:
    """Return the heading of a notebook, which begins with its number."""
    first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
    return first.splitlines()[0].lstrip("# ")


def notebook(path: Path) -> str:
    """Return a notebook as Markdown: prose as it is, code in blocks; outputs are not kept."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "\n\n".join(
        text.replace(".ipynb)", ".md)") if kind == "markdown" else f"```python\n{text}\n```"
        for kind, text in parts
    )

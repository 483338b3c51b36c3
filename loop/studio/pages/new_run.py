"""New run: a configuration from a recipe, checked while it is typed, and started."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import yaml
from nicegui import background_tasks, ui

from ....store.errors import ConfigError, RlakeError, missing_extra
from ...config import RunConfig, load
from ...config.json_schema import json_schema
from ...config.load import recipes
from ...config.stages import load_stages
from ..frame import View, address, page
from ..queries import Rows
from ..schema_keys import Schema, choices, described, keys
from ..widgets import grid, heading, same_as, text, title

MOST_USED = (
    "name",
    "model.path",
    "algorithm",
    "trainer.steps",
    "trainer.batch_size",
    "trainer.learning_rate",
    "explorer.group_size",
    "schedule.max_lag",
)
"""Keys that have fields of their own; the text has all keys."""
Field = ui.input | ui.select
_PAUSE_SECONDS = 0.5
"""How long nothing must be typed before the text is checked, in seconds."""
_START = "grpo_arithmetic"


@dataclass(frozen=True)
class Planned:
    """What a valid configuration comes to."""

    configs: tuple[RunConfig, ...]
    """That of the run, or of each stage."""
    text: str
    """What `--dry-run` prints."""
    memory: list[tuple[str, str, str, str]]
    problems: list[str]


def planned(written: str) -> Planned:
    """Check the YAML of a configuration as `--dry-run` does; raises ConfigError for a wrong one."""
    try:  # not at the top: torch takes seconds, and the other pages do without it
        from ...report.plan import memory_rows, plan
        from ...run import check
        from ...trainer.memory import estimate
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or "torch", "train") from error
    with TemporaryDirectory(prefix="rlake-studio-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(written, encoding="utf-8")
        try:
            stages = load_stages(path)
            configs = tuple(one.config for one in stages) or (load(path),)
            for one in configs:
                check(one)
        except RlakeError as error:
            raise ConfigError(str(error).replace(str(path), "the configuration")) from error
    try:
        found = [estimate(one) for one in configs]
        problems = [problem for one in found for problem in one.problems]
    except RlakeError as error:  # a model of the hub that is not here yet
        found, problems = [], [f"its memory is not known: {error}"]
    rows = [row for one in found for row in memory_rows(one)]
    return Planned(configs, "\n".join(plan(one, full=False) for one in configs), rows, problems)


@page("/new", "New run", section="Runs", order=4)
async def show(view: View) -> None:
    """Edit a configuration: `recipe` is where it starts, `yaml` the text, `keys` more fields."""
    title("New run")
    recipe = view["recipe"] or _START
    written = view["yaml"] or f"extends: {recipe}\nname: my_{recipe}\n"
    with ui.element("div").classes("bar"):
        chooser = ui.select(recipes(), value=recipe, label="Start from a recipe", with_input=True)
        chooser.props("outlined dense").style("width: 300px")
        chooser.on_value_change(lambda event: view.go(recipe=event.value, yaml=""))
        ui.element("div").classes("fill")
        download = ui.button("Download", on_click=lambda: _download(editor.value))
        copy = ui.button("Copy", on_click=lambda: ui.clipboard.write(editor.value))
        for one in (download, copy):
            one.props("flat")
        start = ui.button("Start").props("unelevated")
    with ui.element("div").classes("two"):
        with ui.element("div").classes("card"):
            heading("Most used keys")
            fields = _form(view, lambda key, value: put(key, value))
        with ui.element("div").classes("card"):
            heading("The configuration; it says only what differs from the recipe")
            editor = ui.codemirror(written, language="YAML", line_wrapping=True)
            editor.style("height: 330px")
            said = ui.element("div").style("display: contents")
    follows = ui.element("div").classes("two")
    waiting: list[asyncio.Task[None]] = []

    def put(key: str, value: str) -> None:
        """Write a field into the text; an empty one leaves it to the recipe."""
        changed = changed_yaml(editor.value, key, value)
        if changed is not None and changed != editor.value:
            editor.set_value(changed)

    async def look(*, pause: float) -> None:
        await asyncio.sleep(pause)
        view.remember(yaml=editor.value)
        start.disable()
        try:
            found = await view.call(planned, editor.value)
        except RlakeError as error:
            _say(said, str(error), "error")
            return
        _say(said, "Valid: `rlake run` would start it.", "finding none")
        _show(follows, found)
        plain = found.configs[0].plain()
        for key, field in fields.items():
            now = str(_at(plain, key) or "")
            # nothing is sent to a field in vain: it would lose what is being typed
            if field.value in (None, "") and field.props.get("placeholder") != now:
                field.props["placeholder"] = now
                field.update()
        start.set_enabled(view.studio.can_write)

    async def again() -> None:
        with view.client:
            await look(pause=_PAUSE_SECONDS)

    def typed() -> None:
        while waiting:
            waiting.pop().cancel()
        task = background_tasks.create(again(), name="check")
        waiting.append(task)
        view.keep(task)

    async def begin() -> None:
        start.disable()
        path = Path(mkdtemp(prefix="rlake-studio-")) / "config.yaml"
        path.write_text(editor.value, encoding="utf-8")
        try:
            name = await view.studio.control.start(str(path))
        except RlakeError as error:
            _say(said, str(error), "error")
            return
        ui.navigate.to(address("/run", id=name))

    editor.on_value_change(typed)
    start.on_click(begin)
    if not view.studio.can_write:
        start.tooltip("the studio must be started with --write")
    await look(pause=0)
    same_as(
        command="rlake run config.yaml --dry-run\nrlake doctor config.yaml\nrlake run config.yaml"
    )


def _form(view: View, put: Callable[[str, str], None]) -> dict[str, Field]:
    """Show fields for the most used keys and for `keys`, and a choice of one more.

    The schema says what they mean, and of which values one is chosen.
    """
    schema, made = json_schema(), {}
    known = keys(schema)
    asked = [key for key in view["keys"].split(",") if key in known]
    place = ui.element("div").style("display: contents")

    def add(key: str) -> None:
        if key not in made:
            with place:
                made[key] = _field(schema, key, put)

    for key in dict.fromkeys([*MOST_USED, *asked]):
        add(key)

    def more() -> None:
        if chooser.value:
            add(chooser.value)
            view.remember(keys=",".join(key for key in made if key not in MOST_USED))
            chooser.set_value(None)

    chooser = ui.select(known, label="Another key", with_input=True, on_change=more)
    chooser.props("outlined dense options-dense")
    return made


def _field(schema: Schema, key: str, put: Callable[[str, str], None]) -> Field:
    offered = choices(schema, key)
    made = ui.select(offered, label=key, clearable=True) if offered else ui.input(label=key)
    made.props("outlined dense stack-label hide-bottom-space")
    made.on_value_change(lambda event: put(key, str(event.value or "")))
    made.props["hint"] = described(schema, key).partition(". ")[0].partition("\n")[0]
    return made


def changed_yaml(written: str, key: str, value: str) -> str | None:
    """Return a configuration with another value of a key; None for a text that is no YAML.

    >>> changed_yaml("extends: sft_digits", "trainer.steps", "5")
    'extends: sft_digits\\ntrainer:\\n  steps: 5\\n'
    >>> changed_yaml("trainer: {steps: 5}", "trainer.steps", "")
    '{}\\n'
    """
    try:
        tree, given = yaml.safe_load(written) or {}, yaml.safe_load(value)
    except yaml.YAMLError:
        return None
    *parents, last = key.split(".")
    path = [tree]
    for name in parents:
        if not isinstance(path[-1], dict):
            return None
        path.append(path[-1].setdefault(name, {}))
    if not isinstance(path[-1], dict):
        return None
    if value.strip():
        path[-1][last] = given
    else:
        path[-1].pop(last, None)
    for below, name in zip(reversed(path[:-1]), reversed(parents), strict=True):
        if not below[name]:  # a section that the field had made
            del below[name]
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)


def _at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _say(place: ui.element, said: str, classes: str) -> None:
    place.clear()
    with place:
        text("div", said, classes)


def _show(place: ui.element, found: Planned) -> None:
    """Show what a configuration comes to: what follows from it, and its memory."""
    place.clear()
    with place:
        with ui.element("div").classes("card"):
            heading("What follows from it")
            text("pre", found.text)
        with ui.element("div").classes("card"):
            heading("Memory that it needs")
            for problem in found.problems:
                text("div", problem, "finding")
            if found.memory:
                names = ["part", "device", "memory", "kind"]
                rows: list[tuple[Any, ...]] = [*found.memory]
                shown = Rows(names, ["VARCHAR"] * 4, rows, is_cut=False)
                grid(shown, widths={"device": 80, "memory": 170, "kind": 110})


def _download(written: str) -> None:
    ui.download.content(written, "config.yaml")

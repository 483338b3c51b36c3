"""People label rows: the items of a queue, one after the other, by the mouse or by keys."""

import json
import shlex
from functools import partial
from typing import Any, cast

from nicegui import ui
from nicegui.element import Element
from nicegui.events import KeyEventArguments

from ....store.errors import ConfigError, RlakeError, nearest
from ....store.records import proper
from ...labeling import Item, Question, Queue, parse_choices, progress
from ...labeling.question import GOOD, PAIR, Choice
from ...labeling.queue import Kind, Progress, cut, shown
from ..frame import View, address, notify_error, page
from ..widgets import empty, grid, heading, same_as, text, title

_QUEUES = """SELECT queue, count(*) AS labels, count(DISTINCT annotator) AS annotators,
       max(created_at) AS newest, bool_or(compared_id IS NOT NULL) AS pairs
FROM labels WHERE queue IS NOT NULL GROUP BY queue ORDER BY newest DESC"""
_OFFERED = """SELECT queue, label, any_value(score) FROM labels
WHERE queue IS NOT NULL AND label IS NOT NULL GROUP BY queue, label ORDER BY queue, label"""
_DEFAULTS = {"queue": "review", "choose": "random", "labels": "good=1,bad=0", "reviews": "1"}
_DEFAULTS |= {"question": "Is this answer good?", "where": "", "pairs": ""}
_FIELDS = {
    "queue": "Name of the queue",
    "question": "Question",
    "labels": "Labels with scores, or 1..5",
    "where": "Only where, in SQL",
    "reviews": "People for each",
}
KINDS: dict[str, str] = {
    "random": "any rows",
    "borderline": "groups that pass about half of the time",
    "disagreements": "rewards, scores and labels that differ",
}
_LONGEST_NAME, _LONGEST_COMMENT = 80, 10_000
_LEAVE = "e => ['Enter', 'Escape'].includes(e.key) && e.target.blur()"
_KEPT = "rlake-annotator"
_SHOWN = 100_000
"""Most characters of a text that is shown."""


@page("/label", "Label", section="Rows", order=5)
async def show(view: View) -> None:
    """Label the items of `queue`, as `annotator`; the other parameters are those of the command."""
    if view.studio.queue is not None:
        await _Form(view, view.studio.queue).start()
        return
    if not view.studio.can_write:
        title("Label")
        empty("This studio only reads: start it with `--write`, or label by `rlake label --web`.")
    elif view["queue"]:
        given = {name: view[name] or default for name, default in _DEFAULTS.items()}
        await _Form(view, await view.call(_chosen, view, given)).start()
    else:
        title("Label")
        _choose(view)
    heading("Queues that have labels")
    found = await view.rows(_QUEUES)
    offered: dict[str, dict[str, float | None]] = {}
    for queue, label, score in (await view.rows(_OFFERED)).rows:
        offered.setdefault(queue, {})[label] = score
    links = [_link(row[0], offered.get(row[0], {}), row[-1]) for row in found.rows]
    grid(found, links=links) if found.rows else empty("No label is stored yet.")
    same_as(sql=_QUEUES, command=_command(view))


def _link(queue: str, labels: dict[str, float | None], in_pairs: bool) -> str | None:  # noqa: FBT001
    """Return the address that goes on with a queue: its question offers the stored labels."""
    if in_pairs and labels.keys() <= {choice.label for choice in PAIR.choices}:
        return address("/label", queue=queue, pairs="true")
    known = {choice.label: choice.score for choice in GOOD.choices}
    if labels.keys() <= known.keys():  # nobody may have given the other one yet
        return address("/label", queue=queue)
    if all(name.isdecimal() and score == int(name) for name, score in labels.items()):
        numbers = [int(name) for name in labels]
        return address("/label", queue=queue, labels=f"{min(1, *numbers)}..{max(5, *numbers)}")
    if any("," in name or "=" in name for name in labels):
        return None  # the command line cannot offer such a label either
    given = labels if len(labels) > 1 else labels | known
    pairs = (name if score is None else f"{name}={score!r}" for name, score in given.items())
    return address("/label", queue=queue, labels=",".join(pairs))


def _command(view: View) -> str:
    given = [f"--{name} {shlex.quote(view[name])}" for name in _DEFAULTS if view[name]]
    return " ".join(["rlake label --web", *given]).replace("--pairs true", "--pairs")


def _chosen(view: View, given: dict[str, str]) -> Queue:
    if not given["reviews"].isdecimal() or int(given["reviews"]) < 1:
        raise ConfigError(f"`reviews` must be a number of people, got `{given['reviews']}`")
    if given["choose"] not in KINDS:
        raise ConfigError(f"no choice of rows `{given['choose']}`{nearest(given['choose'], KINDS)}")
    made = Queue.chosen(
        view.store,
        name=given["queue"],
        question=Question(given["question"], parse_choices(given["labels"])),
        kind=cast(Kind, given["choose"]),
        where=given["where"] or None,
        in_pairs=bool(given["pairs"]),
        reviews=int(given["reviews"]),
    )
    made.check(view.store)
    return made


def _choose(view: View) -> None:
    """Show the fields that choose a queue."""
    fields: dict[str, Any] = {}
    with ui.element("div").classes("card"):
        with ui.element("div").classes("bar"):
            for name, label in _FIELDS.items():
                fields[name] = ui.input(label, value=_DEFAULTS[name])
            fields["choose"] = ui.select(KINDS, value="random", label="Rows")
            for field in fields.values():
                field.props("outlined dense").classes("fill")
        fields["pairs"] = ui.checkbox("Compare two rollouts of a group that answer differently")

        def go() -> None:
            given = {name: field.value or "" for name, field in fields.items()}
            view.go(**given | {"pairs": "true" if given["pairs"] else ""})

        ui.button("Label", on_click=go).props("unelevated").style("align-self: start")


class _Form:
    """One person's look at a queue."""

    def __init__(self, view: View, queue: Queue) -> None:
        self._view, self._queue = view, queue
        self._item: Item | None = None
        self._before: list[str] = []
        self._busy = False

    async def start(self) -> None:
        """Show the form, and the first item for whoever is named."""
        choices = self._queue.question.choices
        with ui.element("div").classes("bar"):
            title(self._queue.name)
            name = self._view["annotator"] or self._view.studio.annotator
            self._who = ui.input("You are", value=name, on_change=self._renamed)
            self._who.props("outlined dense debounce=400").on("keydown", js_handler=_LEAVE)
            self._bar = Element("progress").classes("fill")
            self._count = ui.label().classes("soft")
        self._said = ui.label().props("role=status")
        with ui.element("div").classes("card") as self._form:
            self._parts = {name: self._part(name) for name in ("task", "expected")}
            with ui.element("div").classes("two"):
                self._parts |= {name: self._part(name) for name in ("first", "second")}
            heading(self._queue.question.text)
            with ui.element("div").classes("bar"):
                for i, choice in enumerate(choices, 1):
                    name = self._queue.question.keyed(i) if i < 10 else choice.label
                    ui.button(name, on_click=partial(self._label, choice)).props("outline")
                ui.button("s  skip", on_click=partial(self._label, None)).props("flat")
                ui.button("b  back", on_click=self._back).props("flat")
            self._comment = ui.textarea("Comment (Escape leaves this field)")
            self._comment.props("outlined dense autogrow").on(
                "keydown.esc", js_handler="e => e.target.blur()"
            )
        ui.keyboard(on_key=self._key, repeating=False, ignore=["input", "select", "textarea"])
        await self._next()
        ui.timer(0, self._recall, once=True)

    async def _recall(self) -> None:
        """Take the name that this browser keeps: an address is shared, and only suggests one."""
        kept = await ui.run_javascript(f"return localStorage.getItem('{_KEPT}')", timeout=5)
        if kept:
            self._who.set_value(kept)

    def _part(self, name: str) -> tuple[Element, Any]:
        with ui.element("div") as made:
            label = text("div", name, "heading")
            return made, (label, text("pre", ""))

    async def _renamed(self) -> None:
        self._before.clear()
        kept = json.dumps(str(self._who.value or ""))
        ui.run_javascript(f"localStorage.setItem('{_KEPT}', {kept})")
        await self._next()

    async def _key(self, event: KeyEventArguments) -> None:
        held = event.modifiers
        if not event.action.keydown or held.ctrl or held.alt or held.meta:
            return
        name = str(event.key)
        if name.isdecimal() and (choice := self._queue.question.meant(name)) is not None:
            await self._label(choice)
        elif name == "s":
            await self._label(None)
        elif name == "b":
            await self._back()

    async def _label(self, choice: Choice | None) -> None:
        if self._item is None or self._busy:
            return
        # as they are now: a name that is typed meanwhile is that of the next label
        item, who = self._item, self._who.value
        comment = proper(str(self._comment.value or ""))

        def add() -> None:
            if len(comment) > _LONGEST_COMMENT:
                raise ConfigError(f"a comment has at most {_LONGEST_COMMENT:,} characters")
            self._queue.add(self._view.store, item, _name(who), choice, comment=comment)

        if await self._do(add):
            self._view.studio.queries.wrote()
            if who == self._who.value:
                self._before.append(item.key)
            await self._next()

    async def _back(self) -> None:
        if self._before and not self._busy:
            await self._next(self._before.pop())

    async def _next(self, key: str | None = None) -> None:
        if not str(self._who.value or "").strip():
            self._show(None, None, "Say who you are.")
            return
        who = self._who.value
        found: list[tuple[Item | None, dict[str, Any], Progress]] = []

        def look() -> None:
            store, queue, name = self._view.store, self._queue, _name(who)
            item = queue.named(key) if key else queue.next(store, name)
            texts = shown(store, item) if item else {}
            found.append((item, texts, progress(queue, store, name)))

        # of another name, what `_renamed` reads is shown
        if await self._do(look) and who == self._who.value:
            [(item, texts, at)] = found
            self._show(item, texts, "" if item else "Nothing is left for you in this queue.")
            self._bar.props(f"value={at.done} max={at.items}")
            self._count.set_text(f"{at.done} of {at.items} done, {at.mine} by you")

    async def _do(self, work: Any) -> bool:
        """Do something in a thread; return whether it could be done, and the browser is there."""
        self._busy = True
        try:
            await self._view.write(work)
        except RlakeError as error:
            notify_error(error)
            return False
        finally:
            self._busy = False
        return not self._view.client.is_deleted

    def _show(self, item: Item | None, texts: dict[str, Any] | None, said: str) -> None:
        self._item = item
        self._said.set_text(said)
        self._said.set_visibility(bool(said))
        self._form.set_visibility(item is not None)
        self._bar.set_visibility(texts is not None)
        self._comment.set_value("")
        texts = texts or {}
        named = {"task": "prompt", "expected": "answer", "first": "first", "second": "second"}
        for name, (place, (label, pre)) in self._parts.items():
            content = texts.get(named[name])
            place.set_visibility(content is not None)
            pre.set_text(cut(str(content or ""), _SHOWN))
            if name == "first":
                label.set_text("first" if "second" in texts else "reply")


def _name(given: str | None) -> str:
    name = str(given or "").strip()
    if not name or len(name) > _LONGEST_NAME or proper(name) != name:
        raise ConfigError(f"an annotator's name has 1 to {_LONGEST_NAME} valid characters")
    return name

"""One rollout: its turns, tokens, rewards, the steps that it was trained in, and its relatives."""

import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from fastapi import Response
from nicegui import ui

from ....store.image_parts import is_image, parts_of
from ....store.media import image_bytes
from ....store.query import is_in, literal
from ..frame import Studio, View, address, answers, page
from ..tokens import show_tokens
from ..widgets import facts, grid, heading, number, records, same_as, text, title

_LONGEST = 20_000
"""Most characters of a message that are shown."""
_TURNS = 200
IMAGE = "/rollout/image"
_MIMES = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")
_RELATIVES = 100
_FACTS = ("policy_version", "num_tokens", "num_turns", "finish_reason", "drop_reason", "source")
_FACTS += ("engine", "temperature", "priority", "advantage")


async def read(view: View, experience_id: str) -> dict[str, Any]:
    """Return a rollout's row; NotFoundError if there is none."""
    columns = (
        "experience_id, run_id, task_id, group_id, batch, parent_id, reward, rewards, metrics, "
        f"segments, prompt_text, response_text, messages, {', '.join(_FACTS)}"
    )
    return await view.one(
        f"SELECT {columns} FROM experiences WHERE experience_id = {literal(experience_id)}",
        absent=f"no rollout `{experience_id}` in this store; find one on the page Rollouts",
    )


@page("/rollout", "Rollout")
async def show(view: View) -> None:
    """Show the rollout `id`; with `with=ID`, next to another one."""
    one = await read(view, view["id"])
    title(one["experience_id"])
    if view["with"]:
        await _beside(view, one, await read(view, view["with"]))
        return
    with ui.element("div").classes("bar"):
        if one["run_id"]:
            ui.link(f"run {one['run_id']}", address("/run", id=one["run_id"]))
        group = f"group_id = {literal(one['group_id'])}"
        ui.link("its group", address("/rollouts", where=group, sort="reward", order="desc"))
        task = f"task_id = {literal(one['task_id'])}"
        ui.link("its task", address("/rollouts", where=task))
    with ui.element("div").classes("two"):
        with ui.element("div").classes("card"):
            facts({"reward": one["reward"], **{name: one[name] for name in _FACTS}})
            _named("Reward parts", one["rewards"])
            _named("Measurements", one["metrics"])
            _segments(one["segments"])
        with ui.element("div").classes("card"):
            heading("Conversation")
            _conversation(turns(one))
    tokens = ui.element("div").classes("card")
    await _lineage(view, one)
    with tokens:  # last: the first time, it takes seconds to load the libraries of tokenizers
        await show_tokens(view, one["experience_id"])
    same_as(
        sql=f"SELECT * FROM experiences WHERE experience_id = {literal(one['experience_id'])}",
        command=f"rlake show {shlex.quote(one['experience_id'])} --tokens",
    )


def _named(name: str, values: Sequence[Mapping[str, Any]] | None) -> None:
    if values:
        heading(name)
        facts({str(one["name"]): number(one["value"]) for one in values})


def _segments(segments: Sequence[Mapping[str, Any]] | None) -> None:
    """Show which weights sampled how many tokens."""
    if segments:
        heading("Sampled tokens by version of the weights")
        facts({f"version {one['policy_version']}": one["num_tokens"] for one in segments})


class Turn(NamedTuple):
    """A message: calls of tools are part of the text."""

    role: str
    said: str
    images: tuple[str, ...] = ()
    """IDs of the images that it shows."""


def turns(row: Mapping[str, Any]) -> list[Turn]:
    """Return the messages of a rollout, tool calls included.

    >>> row = {"messages": None, "prompt_text": "1+1=", "response_text": "2"}
    >>> [turn.said for turn in turns(row)]
    ['1+1=', '2']
    """
    try:
        messages = json.loads(row["messages"]) if row["messages"] else None
    except (ValueError, RecursionError):
        messages = [{"role": "messages that are no JSON", "content": row["messages"]}]
    if not isinstance(messages, list) or not messages:
        both = (("user", row["prompt_text"]), ("assistant", row["response_text"]))
        return [Turn(role, said) for role, said in both if said is not None]
    found = [_turn(one) for one in messages if isinstance(one, Mapping)]
    if found and found[-1].role != "assistant" and row["response_text"]:
        found.append(Turn("assistant", row["response_text"]))
    return found


def _turn(message: Mapping[str, Any]) -> Turn:
    content, images = message.get("content") or "", []
    if isinstance(content, list):
        images = [str(part["media_id"]) for part in parts_of([message]) if part.get("media_id")]
        texts = [part for part in content if isinstance(part, Mapping) and not is_image(part)]
        content = "\n".join(str(part.get("text") or f"[{part.get('type')}]") for part in texts)
    thought = message.get("reasoning_content")
    said = f"(thinks) {thought}\n\n{content}" if thought else str(content)
    for call in message.get("tool_calls") or ():
        function = call.get("function", {}) if isinstance(call, Mapping) else {}
        said += f"\n→ {function.get('name') or '?'}({function.get('arguments')})"
    return Turn(str(message.get("role")), said.strip(), tuple(images))


@answers(IMAGE)
async def image(studio: Studio, params: Mapping[str, str]) -> Response:
    """Return the bytes of a stored image, of a type that browsers show and never run."""
    key = params.get("id", "")
    found = await studio.queries.rows(f"SELECT mime FROM media WHERE media_id = {literal(key)}")
    mime = found.rows[0][0] if found.rows else ""
    data = (await studio.queries.call(image_bytes, studio.store, [key]))[key]
    return Response(data, media_type=mime if mime in _MIMES else "application/octet-stream")


def _conversation(said: Sequence[Turn]) -> None:
    for turn in said[:_TURNS]:
        _show_turn(turn)
    if len(said) > _TURNS:
        ui.label(f"{len(said) - _TURNS:,} more turns; the SQL below gives them").classes("soft")


def _show_turn(turn: Turn, *, classes: str = "") -> None:
    kind = turn.role if turn.role in ("assistant", "tool") else ""
    with ui.element("div").classes(f"turn {kind} {classes}"):
        text("div", turn.role, "role")
        text("div", turn.said[:_LONGEST], "said")
        if len(turn.said) > _LONGEST:
            more = f"{len(turn.said) - _LONGEST:,} more characters; the SQL below gives them"
            text("div", more, "role")
        for one in turn.images:
            shown = ui.element("img")
            shown.props["src"], shown.props["alt"] = address(IMAGE, id=one), f"image {one}"


async def _lineage(view: View, one: Mapping[str, Any]) -> None:
    found = await view.call(view.store.lineage, one["experience_id"])
    group = await view.query(
        "SELECT experience_id, rollout_index, reward, num_tokens, finish_reason, policy_version "
        f"FROM experiences WHERE group_id = {literal(one['group_id'])} "
        f"AND experience_id <> {literal(one['experience_id'])} "
        f"ORDER BY rollout_index LIMIT {_RELATIVES}"
    )
    with ui.element("div").classes("two"):
        with ui.element("div").classes("card"):
            heading("Trained in")
            if found.draws:
                names = ("run_id", "step", "position", "lag", "advantage", "weight", "counts")
                steps = [_step(draw) for draw in found.draws]
                grid(records(found.draws, *names), links=steps, max_height=260)
            else:
                ui.label("No step has drawn it.").classes("soft")
        with ui.element("div").classes("card"):
            heading("Others of its group: a click compares")
            if group:
                links = [view.address(**{"with": other["experience_id"]}) for other in group]
                names = ("rollout_index", "reward", "num_tokens", "finish_reason", "policy_version")
                grid(records(group, *names), links=links, max_height=260)
            else:
                ui.label("It is alone.").classes("soft")
    for name in ("parents", "children", "preferences", "scores", "feedback", "derived", "drops"):
        rows = getattr(found, name)
        if rows:
            with ui.element("div").classes("card"):
                heading(name.capitalize())
                links = [_relative(row) for row in rows]
                grid(records(rows), links=links if any(links) else None, max_height=260)


def _step(draw: Mapping[str, Any]) -> str:
    where = (
        "experience_id IN (SELECT experience_id FROM draws_current "
        f"WHERE run_id = {literal(draw['run_id'])} AND step = {draw['step']})"
    )
    return address("/rollouts", where=where)


def _relative(row: Mapping[str, Any]) -> str | None:
    other = row.get("experience_id")
    return None if other is None else address("/rollout", id=other)


async def _beside(view: View, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Show two rollouts turn by turn, and where they part."""
    both = turns(one), turns(other)
    part = parted(*both)
    if part is None:
        where = "They say the same."
    else:
        turn, character = part
        where = f"They part at turn {turn + 1}, after {character:,} equal characters."
    ui.label(where).classes("soft")
    with ui.element("div").classes("two"):
        for row in (one, other):
            with ui.element("div").classes("card"):
                ui.link(row["experience_id"], address("/rollout", id=row["experience_id"]))
                facts({"reward": row["reward"], "tokens": row["num_tokens"]})
                _named("Reward parts", row["rewards"])
    for i, pair in enumerate(list(zip_longest(*both))[:_TURNS]):
        with ui.element("div").classes("two"):
            for turn in pair:
                here = part is not None and part[0] == i
                with ui.element("div").classes("card"):
                    _show_turn(turn or Turn("", ""), classes="parts" if here else "")
    ids = [one["experience_id"], other["experience_id"]]
    same_as(
        sql="SELECT experience_id, reward, rewards, messages, response_text FROM experiences "
        f"WHERE {is_in('experience_id', ids)}",
        command="\n".join(f"rlake show {shlex.quote(name)}" for name in ids),
    )


def parted(one: Sequence[Turn], other: Sequence[Turn]) -> tuple[int, int] | None:
    """Return the turn and the character at which two conversations part; None if they do not.

    >>> question = Turn("user", "?")
    >>> parted([question, Turn("assistant", "yes")], [question, Turn("assistant", "yet")])
    (1, 2)
    """
    for i, (mine, its) in enumerate(zip_longest(one, other)):
        if mine != its:
            if mine is None or its is None or mine.role != its.role:
                return i, 0
            pairs = enumerate(zip_longest(mine.said, its.said))
            return i, next((place for place, (a, b) in pairs if a != b), len(mine.said))
    return None

"""Lineage: from a policy to the rows that made it, and from a rollout to what it influenced."""

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from nicegui import ui

from ....store.lineage.experience import ExperienceLineage, of_experience
from ....store.lineage.policy import PolicyLineage, of_policy
from ....store.query import literal
from ..frame import View, address, page
from ..graph import Box, graph, limited
from ..widgets import empty, facts, grid, heading, number, records, same_as, title

_POLICIES = """SELECT run_id, max(policy_version) AS last FROM policies_current
GROUP BY run_id ORDER BY max(created_at) DESC"""
_SHOWN = 500
"""Rows of a table."""
_OUTCOMES = ("scores", "feedback", "derived", "preferences", "drops")


@page("/lineage", "Lineage", section="Data", order=1)
async def show(view: View) -> None:
    """Trace the policy `version` of `run`, or the rollout `experience`."""
    title("Lineage")
    last = {str(run): version for run, version in (await view.rows(_POLICIES)).rows}
    run_id = view["run"] or next(iter(last), "")
    version = view["version"] or last.get(run_id, "")
    _form(view, run_id, version, list(last))
    if view["experience"]:
        traced = await view.call(of_experience, view.store, view["experience"])
        await _experience(traced)
        same_as(
            sql=traced.sql, command=f"rlake lineage --experience {shlex.quote(view['experience'])}"
        )
    elif run_id:
        number_ = int(version) if str(version).isdecimal() else -1
        found = await view.call(of_policy, view.store, run_id, number_)
        await _policy(view, found)
        name = f"{found.run_id}:{found.policy_version}"
        same_as(sql=found.sql, command=f"rlake lineage --policy {shlex.quote(name)}")
    else:
        empty("No run has published weights yet: `rlake run grpo_arithmetic` makes some.")


def _form(view: View, run_id: str, version: Any, runs: Sequence[str]) -> None:
    def trace() -> None:
        view.go(run=chooser.value, version=which.value, experience="")

    def follow() -> None:
        view.go(experience=rollout.value)

    with ui.element("div").classes("bar"):
        known = list(dict.fromkeys([*([run_id] if run_id else []), *runs]))
        chooser = ui.select(known, value=run_id or None, label="Run").style("width: 260px")
        chooser.on_value_change(lambda event: view.go(run=event.value, version="", experience=""))
        which = ui.input("Version", value=str(version)).style("width: 110px")
        which.on("keydown.enter", trace)
        ui.button("Trace the policy", on_click=trace).props("outline")
        rollout = ui.input("ID of a rollout", value=view["experience"]).classes("fill")
        rollout.on("keydown.enter", follow)
        ui.button("Trace the rollout", on_click=follow).props("outline")
        for one in (chooser, which, rollout):
            one.props("outlined dense")


async def _policy(view: View, found: PolicyLineage) -> None:
    run_id, version = literal(found.run_id), found.policy_version
    [(sampled,)] = (
        await view.rows(
            f"SELECT count(*) FROM experiences WHERE run_id = {run_id} "
            f"AND policy_version = {version}"
        )
    ).rows
    with ui.element("div").classes("card"):
        graph(*_of_policy(found, sampled))
    with ui.element("div").classes("card"):
        heading("In numbers")
        named = {k.removeprefix("num_").replace("_", " "): v for k, v in found.rows.items()}
        facts(named)
        facts(
            {
                "batches' digest": found.batches_digest,
                "code": ", ".join(found.code_versions) or None,
                "tokenizers": ", ".join(found.tokenizers) or None,
            }
        )
    _table("Where the rows come from", found.sources)
    _table("Pipelines that made, changed or left out rows", found.pipelines)
    with ui.element("div").classes("two"):
        _table("Workflows and rewards", found.functions)
        _table("Side columns", found.side_columns)
        _table("Snapshots that it read", found.snapshots, "name", "created_at")
        _table("Attempts", found.attempts)
    steps = [
        address(
            "/rollouts",
            where="experience_id IN (SELECT experience_id FROM draws_current "
            f"WHERE run_id = {run_id} AND step = {one['step']})",
        )
        for one in found.batches
    ]
    _table("Steps: a click opens their rows", found.batches, "step", "batch_digest", links=steps)


def _table(
    name: str, rows: Sequence[Any], *columns: str, links: list[str | None] | list[str] | None = None
) -> None:
    if rows:
        with ui.element("div").classes("card"):
            heading(name)
            grid(records(rows[-_SHOWN:], *columns), links=links and links[-_SHOWN:], max_height=300)


def _of_policy(found: PolicyLineage, sampled: int) -> tuple[dict[str, Box], list[tuple[str, str]]]:
    """Return the boxes and lines of a policy: what made its rows, the rows, and its rollouts."""
    run_id, version = found.run_id, found.policy_version
    mine = literal(run_id)
    made: dict[str, Box] = {}
    for i, one in enumerate(found.sources):
        low, high = one["policy_version_min"], one["policy_version_max"]
        by = f"versions {low} to {high}" if low is not None else "no version"
        where = f"source = {literal(str(one['source']))}"
        where += f" AND run_id = {literal(one['run_id'])}" if one["run_id"] else ""
        link = address("/rollouts", where=where)
        what = f"{one['source'] or 'deleted rows'} of {one['run_id'] or 'no run'}"
        made[f"source {i}"] = Box(0, what, f"{number(one['num_rows'])} draws, {by}", link, "rows")
    for i, one in enumerate(found.pipelines):
        text = f"{one['did']}: {number(one['num_experiences'])} rows"
        link = address("/pipelines", id=one["lineage_id"])
        made[f"pipeline {i}"] = Box(0, f"pipeline {one['pipeline']}", text, link, "kept")
    for i, one in enumerate(found.functions):
        made[f"function {i}"] = Box(
            0, one["name"], f"digest {one['digest'][:12]}", None, "function"
        )
    for i, one in enumerate(found.side_columns):
        made[f"side {i}"] = Box(0, one["spec"], "side column", None, "function")
    for one in found.snapshots:
        link = address("/snapshots", first=one["name"])
        made[f"snapshot {one['name']}"] = Box(0, one["name"], "snapshot", link, "kept")
    boxes = limited(made)
    lines = [(key, "rows") for key in boxes]
    trained = (
        f"experience_id IN (SELECT experience_id FROM draws_current WHERE run_id = {mine} "
        f"AND step <= {version})"
    )
    rows = found.rows
    said = f"{number(rows['num_rows'])} draws, reward {number(rows['reward_mean'])}"
    experiences = f"{number(rows['num_experiences'])} rollouts"
    boxes["rows"] = Box(1, experiences, said, address("/rollouts", where=trained), "rows")
    if found.parents:
        parent = found.parents[0]
        link = address("/lineage", run=run_id, version=parent)
        boxes["parent"] = Box(1, f"version {parent}", f"{run_id}: trained from", link, "policy")
        lines.append(("parent", "policy"))
    if found.begun_from:
        other, _, at = found.begun_from.rpartition(":")
        link = address("/lineage", run=other, version=at)
        boxes["begun"] = Box(1, found.begun_from, "begun from", link, "policy")
        lines.append(("begun", "policy"))
    boxes["policy"] = Box(2, f"version {version}", run_id, address("/run", id=run_id), "policy")
    lines.append(("rows", "policy"))
    where = f"run_id = {mine} AND policy_version = {version}"
    text = f"{number(sampled)} rollouts"
    boxes["sampled"] = Box(3, text, "that it sampled", address("/rollouts", where=where), "rows")
    lines.append(("policy", "sampled"))
    return boxes, lines


async def _experience(found: ExperienceLineage) -> None:
    with ui.element("div").classes("card"):
        graph(*_of_experience(found))
    for name in ("parents", "children", "draws", "policies", *_OUTCOMES):
        _table(name.capitalize(), getattr(found, name))


def _of_experience(found: ExperienceLineage) -> tuple[dict[str, Box], list[tuple[str, str]]]:
    """Return the boxes and lines of a rollout: its origin, and what it influenced."""
    row = found.experience
    made: dict[str, Box] = {}
    if found.task is not None:
        key = str(found.task["task_id"])
        link = address("/rollouts", where=f"task_id = {literal(key)}")
        made["task"] = Box(0, f"task {key}", found.task["taskset"] or "", link)
    if row["run_id"] and row["policy_version"] is not None:
        link = address("/lineage", run=row["run_id"], version=row["policy_version"])
        text = f"version {row['policy_version']}"
        made["sampler"] = Box(0, text, f"{row['run_id']}: sampled it", link, "policy")
    if found.pipeline is not None:
        link = address("/pipelines", id=found.pipeline["lineage_id"])
        text = f"pipeline {found.pipeline['pipeline']}"
        made["pipeline"] = Box(0, text, "stored it", link, "kept")
    for one in found.parents[:1]:
        made["parent"] = _rollout(0, one["experience_id"], "made from")
    boxes = limited(made)
    lines = [(key, "mine") for key in boxes]
    boxes["mine"] = Box(
        1,
        found.experience_id,
        f"reward {number(row['reward'])}",
        address("/rollout", id=found.experience_id),
        "rows",
    )
    after = limited(dict(_after(found)))
    boxes |= after
    lines += [("mine", key) for key in after]
    policies = {
        f"policies {i}": Box(
            3,
            f"versions {one['first_version']} to {one['last_version']}"
            if one["num_versions"]
            else "no version yet",
            one["run_id"],
            address("/lineage", run=one["run_id"], version=one["first_version"]),
            "policy",
        )
        for i, one in enumerate(found.policies)
    }
    steps = {one["run_id"]: f"draw {i}" for i, one in enumerate(found.draws) if one["counts"]}
    for key, one in zip(policies, found.policies, strict=True):
        step = steps.get(one["run_id"])
        lines.append((step if step in boxes else "mine", key))
    return boxes | policies, lines


def _after(found: ExperienceLineage) -> Iterable[tuple[str, Box]]:
    for i, one in enumerate(found.draws):
        text = f"{one['run_id']}, lag {number(one['lag'])}"
        text += "" if one["counts"] else ", superseded"
        link = address("/run", id=one["run_id"])
        yield f"draw {i}", Box(2, f"drawn in step {one['step']}", text, link, "rows")
    for one in found.children:
        yield f"child {one['experience_id']}", _rollout(2, one["experience_id"], "made from it")
    for name in _OUTCOMES:
        rows = getattr(found, name)
        if rows:
            kind = "lost" if name == "drops" else "kept"
            yield name, Box(2, name, f"{number(len(rows))} rows", None, kind)


def _rollout(column: int, experience_id: str, detail: str) -> Box:
    link = address("/lineage", experience=experience_id)
    return Box(column, experience_id, detail, link, "rows")

"""`POST /feedback`: judgments of people and programs become rows of the table `feedback`."""

import asyncio
from collections.abc import Mapping
from typing import Any

from ...store import Store
from ...store.errors import ConflictError
from ...store.query import literal
from ...store.records import proper
from ..chat_api.errors import RequestError, feedback_conflict
from ..chat_api.requests import identifier
from ..chat_api.sessions import Session, Sessions, new_key
from .rows import SOURCE, feedback_rows, row_ids
from .store_writer import StoreWriter

WAIT_SECONDS = 30.0
"""How long feedback waits until the rows that it is about are stored."""
_LONGEST = 10_000
_HIGHEST = 1e300
_TARGETS = ("experience_id", "session_id", "response_id")


class Feedback:
    """Takes feedback on a row, a session or a response.

    Feedback on a session is its outcome and ends it, unless `end` is false. Feedback on a response
    is stored for the row that contains it.
    """

    def __init__(self, store: Store, sessions: Sessions, writer: StoreWriter) -> None:
        self._store, self._sessions, self._writer = store, sessions, writer

    async def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        """Store feedback; return the ids of its rows. Raises RequestError."""
        given = _given(body)
        name, target = _target(body)
        rows, is_stored = None, True
        if name == "session_id":
            rows, is_stored = await self._of_session(target, given, ends=body.get("end", True))
        elif name == "response_id" and (live := self._sessions.of_response(target)):
            rows, is_stored = feedback_rows(row_ids(live, target), given), False
            await self._writer.add_feedback(live, rows)
        if rows is None:
            await self._settled(target)
            ids = await asyncio.to_thread(self._find, name, target)
            if not ids:
                raise RequestError(f"no row has {name} `{target}`", param=name, status=404)
            rows = feedback_rows(ids, given)
            try:
                await asyncio.to_thread(self._store.append, "feedback", rows)
            except ConflictError as error:
                raise feedback_conflict() from error
        return {
            "feedback_id": given["feedback_id"],
            "feedback_ids": [row["feedback_id"] for row in rows],
            "experience_ids": [row["experience_id"] for row in rows],
            "stored": is_stored,
        }

    async def _of_session(
        self, session_id: str, given: Mapping[str, Any], *, ends: bool
    ) -> tuple[list[dict[str, Any]] | None, bool]:
        live = self._sessions.find(session_id)
        if live is None or not live.turns:
            return None, True
        rows: list[dict[str, Any]] = []

        async def add(session: Session) -> None:
            rows.extend(feedback_rows(row_ids(session), given))
            await self._writer.add_feedback(session, rows)

        if not ends:
            await add(live)
            return rows, False
        # Added when no more turns can come, so that it covers all rows of the session.
        await self._sessions.end(session_id, last=add)
        return rows, await self._writer.stored(live, seconds=WAIT_SECONDS)

    async def _settled(self, target: str) -> None:
        """Wait for the rows of sessions that have ended. Raises RequestError."""
        for session in [*self._sessions.ending, *self._writer.waiting()]:
            if target in (session.id, *session.responses) or session.key in target:
                await session.handed.wait()
                if not await self._writer.stored(session, seconds=WAIT_SECONDS):
                    message = "the rows are not stored yet; try again"
                    raise RequestError(message, status=503, retry_after=WAIT_SECONDS)

    def _find(self, name: str, target: str) -> list[str]:
        where = f"{name} = {literal(target)}"
        if name == "response_id":
            # `contains` is cheap, and spares most rows the parsing of their metadata
            names = "json_extract_string(metadata, '$.responses[*]')"
            where = f"contains(metadata, {literal(target)}) AND list_contains({names}, "
            where += f"{literal(target)})"
        if name != "experience_id":
            where += f" AND source = '{SOURCE}'"
        rows = self._store.sql(
            f"SELECT experience_id FROM experiences WHERE {where} ORDER BY experience_id"
        ).fetchall()
        return [row[0] for row in rows]


def _target(body: Mapping[str, Any]) -> tuple[str, str]:
    given = [name for name in _TARGETS if body.get(name) is not None]
    if len(given) != 1:
        message = f"feedback names one of {', '.join(_TARGETS)}, got {', '.join(given) or 'none'}"
        raise RequestError(message, param=(given or _TARGETS)[0])
    name = identifier(body[given[0]], given[0])
    assert name is not None, "it is given"
    return given[0], name


def _given(body: Mapping[str, Any]) -> dict[str, Any]:
    score = body.get("score", body.get("reward"))
    right = isinstance(score, int | float) and not isinstance(score, bool)
    if score is not None and not (right and abs(score) <= _HIGHEST):
        raise RequestError(f"`score` must be a finite number, got {score!r:.100}", param="score")
    label, comment = (_text(body, name) for name in ("label", "comment"))
    if score is None and label is None and comment is None:
        raise RequestError("feedback has a `score`, a `label` or a `comment`", param="score")
    if not isinstance(body.get("end", True), bool):
        raise RequestError("`end` must be true or false", param="end")
    return {
        "feedback_id": identifier(body.get("feedback_id"), "feedback_id") or new_key(),
        "annotator": identifier(body.get("annotator"), "annotator") or "client",
        "score": None if score is None else float(score),
        "label": label and proper(label),
        "comment": comment and proper(comment),
    }


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and (not isinstance(value, str) or len(value) > _LONGEST):
        raise RequestError(
            f"`{name}` must be a text of at most {_LONGEST:,} characters", param=name
        )
    return value

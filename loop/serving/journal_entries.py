"""The journal's entries: turns as JSON, and sessions made of them again."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..chat_api.sessions import Session
from ..inference.policy import Completion, Sampling, Segment, Timing, Turn


def session_entry(session: Session, turns: Sequence[Turn], response_id: str) -> dict[str, Any]:
    """Return the entry of a request's turns, which have the same question."""
    return {
        "key": session.key,
        "session": session.id,
        "group": session.group_id,
        "response": response_id,
        "messages": list(turns[0].messages),
        "tools": list(turns[0].tools) if turns[0].tools else None,
        "completions": [_told(turn.completion) for turn in turns],
    }


def sessions_of(entries: Iterable[Mapping[str, Any]]) -> list[Session]:
    """Return the sessions that entries tell of, each with all its turns."""
    found: dict[str, Session] = {}
    for entry in entries:
        key = entry["key"]
        session = found.get(key)
        if session is None:
            name = entry.get("session", key)
            session = found[key] = Session(id=name, key=key, group_id=entry.get("group"))
        if "feedback" in entry:
            session.feedback += entry["feedback"]
            continue
        session.turns += [_turn(entry, message) for message in entry["completions"]]
        session.responses += [entry["response"]] * len(entry["completions"])
    return list(found.values())


def _told(one: Completion) -> dict[str, Any]:
    message = dict(vars(one))
    for name in ("prompt_ids", "token_ids", "logprobs"):
        message[name] = None if message[name] is None else list(message[name])
    message["segments"] = [asdict(segment) for segment in one.segments]
    message["timing"] = asdict(one.timing)
    message["sampling"] = asdict(one.sampling) if one.sampling else None
    return message


def _turn(entry: Mapping[str, Any], told: Mapping[str, Any]) -> Turn:
    values = {**told, "timing": Timing(**told["timing"])}
    values["segments"] = [Segment(**segment) for segment in told["segments"]]
    if how := told.get("sampling"):  # a journal of an older version has none
        values["sampling"] = Sampling(**{**how, "stop": tuple(how["stop"])})
    return Turn(messages=entry["messages"], tools=entry["tools"], completion=Completion(**values))

"""A request with its answer so far, and the API in whose format both are."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..inference.policy import Completion, PolicyError
from ..inference.token_stream import TokenStream
from ..models.reasoning import marked
from . import responses
from .errors import RequestError
from .metrics import ServingMetrics
from .requests import ChatRequest
from .sessions import new_key


class Chunks(Protocol):
    """The pieces of a streamed answer."""

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield what comes before the first text."""
        ...

    def text(self, i: int, text: str) -> Iterator[dict[str, Any]]:
        """Yield the next text of a choice."""
        ...

    def end(
        self, completions: Sequence[Completion], left: Sequence[str]
    ) -> Iterator[dict[str, Any]]:
        """Yield the rest of each text, and what is known only at the end."""
        ...


@dataclass(frozen=True)
class Format:
    """One of OpenAI's APIs."""

    name: str
    """Its name in metrics."""
    prefix: str
    """The beginning of the names of its responses."""
    read: Callable[[Mapping[str, Any]], ChatRequest]
    """Reads a body; raises RequestError."""
    whole: Callable[["ChatExchange"], dict[str, Any]]
    """Writes an answer that is not streamed."""
    chunks: Callable[["ChatExchange"], Chunks]
    """Writes an answer in pieces."""
    event: Callable[[Mapping[str, Any] | str], bytes] = responses.event
    """Writes a piece as an event."""
    done: Sequence[str] = ("[DONE]",)
    """What follows the last event."""


@dataclass(eq=False)
class ChatExchange:
    """A request and its answer so far."""

    format: Format
    asked: ChatRequest
    model: str
    token_text: responses.TokenText
    nbytes: int
    """The size of the request's body."""
    began: float
    listener: TokenStream | None = None
    """Receives the answer while it is sampled; None if it is sent whole."""
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    session_id: str = ""
    """The name of its session, once it is being answered."""
    completions: list[Completion] = field(default_factory=list)
    """The completions that are recorded."""
    left: list[str] = field(default_factory=list)
    """The rest of each text that was not streamed during sampling."""
    engine_seconds: float = 0.0
    recorded: float = 0.0
    """When they were recorded, by `perf_counter`; 0 before."""

    def sampled(self, completions: list[Completion]) -> None:
        """Set the completions; raise RequestError if a different text was already streamed."""
        self.completions = completions
        contents = [marked(one.answer) for one in completions]
        try:
            self.left = contents if self.listener is None else self.listener.left(contents)
        except PolicyError as error:
            raise RequestError(str(error), status=500) from error

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields that all responses of a kind begin with."""
        made = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return made | {"session_id": self.session_id}

    def __post_init__(self) -> None:
        """Take a new name, unless one was given."""
        self.id = self.id or f"{self.format.prefix}{new_key()}"

    def observe(self, metrics: ServingMetrics, seconds: float) -> float:
        """Record the total time, and record and return the server's overhead.

        The overhead is the time until recording, without the engine's time, plus `seconds` for
        encoding the response. How fast a client reads does not count.
        """
        overhead = max(0.0, self.recorded - self.began - self.engine_seconds) + seconds
        metrics.seconds.observe(time.perf_counter() - self.began)
        metrics.overhead.observe(overhead)
        return overhead

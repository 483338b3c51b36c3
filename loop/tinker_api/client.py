"""A server of Tinker's API: connect, with bounded waits, and errors that say how to go on."""

import os
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import httpx

from ...store.errors import JobError, message_of, missing_extra

if TYPE_CHECKING:
    pass

T = TypeVar("T", covariant=True)

_OWN_KEY = "tml-none"
"""The key for servers of one's own, which check none; the client refuses to have none."""
_HEALTH = "/api/v1/healthz"


class _Future(Protocol[T]):
    def result(self, timeout: float | None = None) -> T: ...


class TinkerClient:
    """A session at a server, which the server ends soon after this process does."""

    def __init__(self, base_url: str | None, *, request_timeout: float) -> None:
        """Raise JobError if no server answers at the address, or it refuses the key."""
        try:
            import tinker
            from tinker.lib.retryable_exception import RetryableException
        except ImportError as error:
            raise missing_extra(error.name or "tinker", "tinker") from error
        own = (tinker.TinkerError, RetryableException)
        self.errors: tuple[type[BaseException], ...] = (*own, ValueError, CancelledError)
        """What a failed request raises."""
        url = base_url or os.environ.get("TINKER_BASE_URL")
        self.name = url or "Thinking Machines' service"
        self._seconds = request_timeout
        if url is not None:
            _check_answers(url)
        key = os.environ.get("TINKER_API_KEY") or (_OWN_KEY if url else None)
        if key is None:
            raise JobError(
                "`trainer.backend.tinker` has no `base_url`, so that the server is Thinking "
                "Machines', and `TINKER_API_KEY` is not set; set it with `export "
                "TINKER_API_KEY=...`, or `base_url` to the address of your own server"
            )
        self.service: tinker.ServiceClient = self.call(
            lambda: tinker.ServiceClient(base_url=url, api_key=key), "begin a session"
        )

    def call(self, work: Callable[[], T], what: str) -> T:
        """Return what a call of the client returns; JobError if it failed, or took too long."""
        # In a thread that does not keep the process alive: not every call takes a timeout.
        made: Future[T] = Future()
        Thread(target=_run, args=(work, made), name="rlake-tinker", daemon=True).start()
        return self.wait(made, what)

    def wait(self, future: "_Future[T]", what: str) -> T:
        """Return the result of a request; JobError if it failed, or took too long."""
        try:
            return future.result(self._seconds)
        except TimeoutError as error:
            raise JobError(
                f"the server `{self.name}` did not {what} within {self._seconds:g} s; look at its "
                "log, raise `request_timeout`, and continue with `--resume`"
            ) from error
        except self.errors as error:
            raise JobError(self.explain(error, what)) from error

    def explain(self, error: BaseException, what: str) -> str:
        """Return why a request failed and what to do."""
        return (
            f"the server `{self.name}` could not {what}: {reason(error)}. If it was restarted or "
            "ended the session, it has forgotten the model: `--resume` continues from the newest "
            "checkpoint whose state it still has"
        )

    def close(self) -> None:
        """End the session's heartbeat."""
        self.service.holder.close()


def reason(error: BaseException) -> str:
    """Return what a server said, in one line."""
    found: Any = error
    while found is not None:  # the client wraps the server's answer
        body = getattr(found, "body", None)
        if isinstance(body, dict) and (said := body.get("detail") or body.get("error")):
            return f"{type(found).__name__}: {said}"
        found = found.__cause__
    return message_of(error, 300)


def _run(work: Callable[[], T], made: "Future[T]") -> None:
    try:
        made.set_result(work())
    except BaseException as error:  # noqa: BLE001 - raised by whoever waits
        made.set_exception(error)


def _check_answers(url: str) -> None:
    """Raise JobError if nothing answers: the client would try for five minutes."""
    try:
        found = httpx.get(url.rstrip("/") + _HEALTH, timeout=30).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        problem = message_of(error, 200)
    else:
        if found < 500 and found != 404:
            return
        problem = f"it answers {found} to {_HEALTH}"
    raise JobError(
        f"no server of Tinker's API is at `{url}`: {problem}; start it, or correct "
        "`trainer.backend.tinker.base_url`"
    )

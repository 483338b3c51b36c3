"""Requests that are refused, or could not be answered, as OpenAI shapes errors."""

from typing import Any

from ...store.errors import RlakeError
from ...store.records import proper


class RequestError(RlakeError, ValueError):
    """A request that is refused, or could not be answered, with what HTTP says of it."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status, self.retry_after = param, code, status, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The answer, as OpenAI shapes errors."""
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        kinds |= {429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        summary = {"message": proper(str(self)), "type": kinds.get(self.status, kind)}
        return {"error": {**summary, "param": self.param, "code": self.code}}


def said_already() -> RequestError:
    """Return the error for feedback under the id of other feedback: facts do not change."""
    message = "the `feedback_id` was given already, and said something else"
    return RequestError(message, param="feedback_id", status=409)

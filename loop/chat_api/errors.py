"""Errors of the chat API, in OpenAI's shape."""

from typing import Any

from fastapi.responses import JSONResponse

from ...store.errors import RlakeError
from ...store.records import proper

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class RequestError(RlakeError, ValueError):
    """A request that is refused or could not be answered, with its HTTP status."""

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
        """The body of the response, in OpenAI's shape."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        summary = {"message": proper(str(self)), "type": _KINDS.get(self.status, kind)}
        return {"error": {**summary, "param": self.param, "code": self.code}}

    def response(self, **headers: str) -> JSONResponse:
        """Return the error as a response."""
        if self.retry_after is not None:
            headers["Retry-After"] = f"{self.retry_after:.0f}"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers=headers)


def feedback_conflict() -> RequestError:
    """Return the error for different feedback under an existing id."""
    message = "the `feedback_id` belongs to different feedback; use a new one"
    return RequestError(message, param="feedback_id", status=409)

"""Errors as HTTP answers: a status and one sentence, in the object that each API calls an error."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import (
    BudgetError,
    CancelledError,
    ClosedError,
    ContextError,
    EdgeInferError,
    ModelNotFoundError,
    QueueFullError,
    RequestError,
    TokenizerError,
    UsageError,
)

RETRY_SECONDS = 1
"""Seconds after which a client may retry a request that can be served later."""
_RETRY = {"retry-after": str(RETRY_SECONDS)}
INVALID, AUTHENTICATION, NOT_FOUND = "invalid_request_error", "authentication_error", "not_found_error"
BUSY, UNAVAILABLE, FAILED = "rate_limit_error", "service_unavailable_error", "server_error"


class ApiError(Exception):
    """An answer that is an error.

    Parameters
    ----------
    status : of HTTP
    message : one sentence for the client
    kind : type of the error, in OpenAI's words
    param : field of the request that is wrong
    code : short name that programs compare
    headers : further ones of the answer
    logged : the log's sentence, where it says more than the client may know
    """

    def __init__(self, status: int, message: str, kind: str = INVALID, param: str | None = None,
                 code: str | None = None, headers: Mapping[str, str] | None = None, logged: str = ""):
        super().__init__(message)
        self.logged = logged
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.headers = param, code, dict(headers or {})


def api_error(error: BaseException) -> ApiError:
    """Return the answer for an error of edgeinfer; any other error is a bug, and its text is not sent."""
    message = str(error)
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, message, BUSY, code="queue_full", headers=_RETRY)
    if isinstance(error, ContextError):
        return ApiError(400, message, code="context_length_exceeded")
    if isinstance(error, (RequestError, UsageError, TokenizerError)):
        return ApiError(400, message, code=error.code)
    if isinstance(error, ModelNotFoundError):
        return ApiError(404, message, NOT_FOUND, "model", "model_not_found")
    if isinstance(error, (ClosedError, CancelledError, BudgetError)):
        return ApiError(503, message, UNAVAILABLE, code=error.code, headers=_RETRY)
    if isinstance(error, EdgeInferError):
        return ApiError(500, message, FAILED, code=error.code)
    return ApiError(500, f"The server failed ({type(error).__name__}); its log says more.", FAILED, code="internal")


def busy(message: str) -> ApiError:
    """Return the answer to a request that may come again a little later."""
    return ApiError(429, message, BUSY, code="rate_limit_exceeded", headers=_RETRY)


def unavailable(message: str, code: str) -> ApiError:
    """Return the answer of a server that is loading or about to end."""
    return ApiError(503, message, UNAVAILABLE, code=code, headers=_RETRY)


def ending() -> ApiError:
    """Return the answer of a server that is about to end."""
    return unavailable("The server is about to end; ask another one.", "draining")


def openai_error(error: ApiError) -> dict[str, object]:
    """Return an error as OpenAI's API writes it."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def ollama_error(error: ApiError) -> dict[str, object]:
    """Return an error as ollama's API writes it."""
    return {"error": error.message}


_ANTHROPIC = {400: INVALID, 401: AUTHENTICATION, 403: "permission_error", 404: NOT_FOUND, 413: "request_too_large",
              429: BUSY, 503: "overloaded_error"}


def anthropic_error(error: ApiError) -> dict[str, object]:
    """Return an error as Anthropic's API writes it."""
    kind = _ANTHROPIC.get(error.status, INVALID if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}

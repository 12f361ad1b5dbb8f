"""Errors on the wire: OpenAI's `{"error": {...}}` for whatever goes wrong."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from shared.errors import RequestError

_STATUS_WORDS = {404: "No such route: {method} {path}.", 405: "{path} does not take {method}; use {allow}."}


class ErrorObject(msgspec.Struct):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorShell(msgspec.Struct):
    """The body of every reply that is not a success."""

    error: ErrorObject


def error_json(error: RequestError) -> bytes:
    """The error as a JSON body."""
    return msgspec.json.encode(ErrorShell(ErrorObject(error.message, error.kind, error.param, error.code)))


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    """The error as a reply, with Retry-After where trying again can help."""
    extra = dict(headers or {})
    if error.retry_after is not None:
        extra["Retry-After"] = str(error.retry_after)
    return Response(error_json(error), error.status, extra, "application/json")


def http_error(status: int, method: str, path: str, allow: str, detail: str) -> RequestError:
    """What the router found wrong (404, 405), in the same shape."""
    message = _STATUS_WORDS.get(status, detail).format(method=method, path=shorten(path, 200), allow=allow)
    return RequestError(message, status=status, code={404: "not_found", 405: "method_not_allowed"}.get(status))


def internal_error() -> RequestError:
    """What a client is told of a fault of ours; the traceback goes to the log."""
    return RequestError("The server failed; its log says why.", status=500, kind="server_error")


def not_supported(param: str, message: str = "") -> RequestError:
    """A field that would change the output, but is not built."""
    return RequestError(message or f"{param} is not supported; leave it out.", param=param, code="not_supported")


def refusal_reason(error: RequestError) -> str:
    """A label for the counter of refused requests, out of a small fixed set."""
    if error.code in ("model_not_found", "context_length_exceeded", "not_supported"):
        return error.code
    by_status = {401: "unauthorized", 413: "too_large", 415: "media_type", 429: "busy", 500: "internal"}
    return by_status.get(error.status, "unavailable" if error.status >= 500 else "invalid")


def shorten(value: Any, limit: int = 60) -> str:
    """A value for an error message, cut to `limit` characters."""
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"

"""Request bodies: reading them within limits, and decoding them with errors that name the field."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from services.api.errors import shorten
from shared.errors import RequestError

T = TypeVar("T")
_WHERE = re.compile(r"(.*?)(?: - at `(?:key in )?\$\.?(.*)`)?", re.DOTALL)
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


class ClientGone(Exception):
    """The client closed the connection."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body. Raises RequestError (413, 415), ClientGone.

    JSON only: Content-Type must be absent or name JSON (so that no web page can post here unasked), and the body must
    not be compressed.
    """
    headers = Headers(scope=scope)
    media = headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise RequestError(f"Content-Type must be application/json, got {shorten(media)!r}.", status=415)
    if (coding := headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
        raise RequestError(f"Content-Encoding must be identity, got {shorten(coding)!r}.", status=415)
    length = headers.get("content-length", "0")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    total, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
        total += len(parts[-1])
        if total > limit:
            raise _too_large(limit)
    return b"".join(parts)


def _too_large(limit: int) -> RequestError:
    return RequestError(f"The body is larger than the limit of {limit} bytes.", status=413, code="body_too_large")


def parse(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The body as a struct. Raises RequestError naming the field at fault."""
    try:
        body.decode()  # msgspec does not look at the strings of fields it skips
        return decoder.decode(body)
    except UnicodeDecodeError as error:
        byte = body[error.start]
        raise RequestError(f"The body is not UTF-8: byte 0x{byte:02x} at position {error.start}.") from None
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error), body) from None
    except msgspec.DecodeError as error:
        raise _malformed(str(error), body) from None
    except RecursionError:
        raise RequestError("The body is nested too deeply.") from None


def _malformed(detail: str, body: bytes) -> RequestError:
    if not body.strip():
        return RequestError("The body is empty; send a JSON object.")
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return RequestError(f"The body is not valid JSON: {detail.removeprefix('JSON is malformed: ')}.")
    return RequestError("A string in the body has a lone surrogate (\\ud800 to \\udfff); send whole characters.")


def _wrong_type(text: str, body: bytes) -> RequestError:
    found = _WHERE.fullmatch(text)
    assert found is not None
    detail, path = found[1].replace("`", "").replace("object", "an object", 1), found[2] or ""
    if missing := _MISSING.match(text):
        param = ".".join(filter(None, [path, missing[1]]))
        return RequestError(f"{param} is required.", param=param)
    shown = _value_at(path, body)
    words = f"{detail[0].lower()}{detail[1:]}{f': {shown}' if shown else ''}."
    return RequestError(f"{path or 'The body'}: {words}", param=path or None)


def _value_at(path: str, body: bytes) -> str:
    """The offending value for the message, where the path leads to one that is short to write."""
    try:
        value: Any = json.loads(body)
        for index, key in _STEP.findall(path):
            value = value[int(index)] if index else value[key]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    if value is None or isinstance(value, (list, dict)):
        return ""
    return shorten(json.dumps(value, ensure_ascii=True))

"""What surrounds every request: its id, its key, its place in the counters."""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.body import ClientGone
from services.api.errors import error_response, refusal_reason
from services.api.gateway import Gateway
from shared.errors import RequestError

OPEN_PATHS = frozenset({"/health", "/metrics"})  # for probes and Prometheus, without a key
_CLIENT_GONE = 499
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Frame:
    """ASGI middleware around all routes.

    X-Request-Id is a label: a short one of visible ASCII is sent back, anything else is replaced; ids inside are ours.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway, known_paths: Iterable[str]) -> None:
        self._app = app
        self._gateway = gateway
        self._paths = frozenset(known_paths)
        self._keys = [_digest(key.encode()) for key in gateway.config.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))

        async def send_framed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id)]
            await send(message)

        try:
            if self._allowed(scope, headers.get(b"authorization", b"")):
                await self._app(scope, receive, send_framed)
            else:
                await self._refuse(scope, receive, send_framed)
        except ClientGone:
            status = status or _CLIENT_GONE
        finally:
            self._gateway.metrics.count_http(self._handler(scope["path"]), scope["method"], status or 500)

    def _allowed(self, scope: Scope, authorization: bytes) -> bool:
        if not self._keys or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._keys]  # all, so that time tells nothing
        return scheme.lower() == b"bearer" and any(matches)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = RequestError(
            "The API key is missing or wrong; send 'Authorization: Bearer KEY'.", code="invalid_api_key", status=401
        )
        self._gateway.metrics.refused.labels(refusal_reason(error)).inc()
        await error_response(error, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _handler(self, path: str) -> str:
        """A label from a fixed set, whatever paths clients make up."""
        if path in self._paths:
            return path
        return "/v1/models/{model}" if path.startswith("/v1/models/") else "none"


def _request_id(given: bytes) -> bytes:
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

"""What surrounds every request: its id, its key, its place in the counters, and the reply to what is raised."""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Awaitable

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from services.api.body import ClientGone
from services.api.errors import error_response, http_error, internal_error, refusal_reason
from services.api.gateway import Gateway
from shared.errors import RequestError

OPEN_PATHS = frozenset({"/health", "/metrics"})  # for probes and Prometheus, without a key
_CLIENT_GONE = 499
_NO_KEY = "The API key is missing or wrong; send 'Authorization: Bearer KEY'."
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Frame:
    """The ASGI app: all routes, with one thin layer around them, as each costs its share of every token.

    X-Request-Id is a label: a short one of visible ASCII is sent back, anything else is replaced; ids inside are ours.
    """

    def __init__(self, router: Router, gateway: Gateway) -> None:
        self._router = router
        self._gateway = gateway
        self._paths = frozenset(route.path for route in router.routes if isinstance(route, Route))
        self._keys = [_digest(key.encode()) for key in gateway.config.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        status = 0
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))

        def send_framed(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id)]
            return send(message)

        try:
            if not self._allowed(scope, headers.get(b"authorization", b"")):
                raise RequestError(_NO_KEY, code="invalid_api_key", status=401)
            scope["app"] = self  # so that the router raises what it finds wrong
            await self._router(scope, receive, send_framed)
        except ClientGone:
            status = status or _CLIENT_GONE
        except (RequestError, HTTPException) as error:
            await self._refusal(scope, error)(scope, receive, send_framed)
        except Exception:
            if not status:
                await error_response(internal_error())(scope, receive, send_framed)
            raise  # for uvicorn's log
        finally:
            self._gateway.metrics.count_http(self._handler(scope["path"]), scope["method"], status or 500)

    def _refusal(self, scope: Scope, error: RequestError | HTTPException) -> Response:
        if isinstance(error, RequestError):
            self._gateway.metrics.refused.labels(refusal_reason(error)).inc()
            return error_response(error, {"WWW-Authenticate": "Bearer"} if error.status == 401 else None)
        headers = dict(error.headers or {})
        allow = headers.get("Allow", "")
        return error_response(
            http_error(error.status_code, scope["method"], scope["path"], allow, error.detail), headers
        )

    def _allowed(self, scope: Scope, authorization: bytes) -> bool:
        if not self._keys or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._keys]  # all, so that time tells nothing
        return scheme.lower() == b"bearer" and any(matches)

    def _handler(self, path: str) -> str:
        """A label from a fixed set, whatever paths clients make up."""
        if path in self._paths:
            return path
        return "/v1/models/{model}" if path.startswith("/v1/models/") else "none"


def _request_id(given: bytes) -> bytes:
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

"""The ASGI application: which path leads where, and how exceptions become replies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.api.chat import ChatEndpoint
from services.api.completions import CompletionEndpoint
from services.api.errors import error_response, http_error, internal_error, refusal_reason
from services.api.frame import Frame
from services.api.gateway import Gateway
from services.api.routes import InfoRoutes
from services.api.tokenize import DetokenizeEndpoint, TokenizeEndpoint
from shared.errors import RequestError


def build_app(gateway: Gateway) -> Starlette:
    """The gateway as an ASGI app."""
    info = InfoRoutes(gateway)
    tokenize, detokenize = TokenizeEndpoint(gateway), DetokenizeEndpoint(gateway)
    routes = [
        Route("/v1/chat/completions", ChatEndpoint(gateway), methods=["POST"]),
        Route("/v1/completions", CompletionEndpoint(gateway), methods=["POST"]),
        Route("/v1/models", info.models),
        Route("/v1/models/{model:path}", info.model),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/v1/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/v1/detokenize", detokenize, methods=["POST"]),
        Route("/health", info.health),
        Route("/version", info.version),
        Route("/load", info.load),
        Route("/metrics", info.metrics),
    ]

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        gateway.metrics.refused.labels(refusal_reason(error)).inc()
        return error_response(error)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with gateway.running():
            yield

    app = Starlette(
        routes=routes,
        middleware=[Middleware(Frame, gateway=gateway, known_paths=[route.path for route in routes])],
        exception_handlers={RequestError: refused, HTTPException: _not_routed, Exception: _crashed},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    found = http_error(error.status_code, request.method, request.url.path, headers.get("Allow", ""), error.detail)
    return error_response(found, headers)


async def _crashed(request: Request, error: Exception) -> Response:
    return error_response(internal_error())

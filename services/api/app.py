"""The ASGI application: which path leads where."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.routing import Route, Router

from services.api.chat import ChatEndpoint
from services.api.completions import CompletionEndpoint
from services.api.frame import Frame
from services.api.gateway import Gateway
from services.api.routes import InfoRoutes
from services.api.tokenize import DetokenizeEndpoint, TokenizeEndpoint


def build_app(gateway: Gateway) -> Frame:
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

    @asynccontextmanager
    async def lifespan(app: Frame) -> AsyncIterator[None]:
        async with gateway.running():
            yield

    return Frame(Router(routes, redirect_slashes=False, lifespan=lifespan), gateway)

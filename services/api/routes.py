"""The routes that need neither tokenizer nor worker: health, version, models, load, metrics."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.api.errors import error_response
from services.api.gateway import Gateway, unavailable
from services.api.metrics import CONTENT_TYPE
from shared.version import VERSION


class InfoRoutes:
    """GET routes."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def health(self, request: Request) -> Response:
        """200 with an empty body when the server can serve now, else 503 with the reason."""
        trouble = self.gateway.trouble()
        return error_response(unavailable(trouble)) if trouble else Response()

    async def version(self, request: Request) -> Response:
        return _json({"version": VERSION})

    async def load(self, request: Request) -> Response:
        return _json({"server_load": self.gateway.admission.active})

    async def metrics(self, request: Request) -> Response:
        return Response(self.gateway.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        engine, _ = self.gateway.served()
        return _json({"object": "list", "data": [self._model(name) for name in engine.names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self.gateway.check_model(name)
        return _json(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        engine, model = self.gateway.served()
        return {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "pagebus",
            "root": engine.model or name,
            "parent": None,
            "max_model_len": model.max_model_len,
            "permission": [],
        }


def _json(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")

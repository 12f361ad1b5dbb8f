"""What all routes share: the engine, the limits, the metrics, and whether the server can serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from services.api.admission import Admission
from services.api.errors import shorten
from services.api.metrics import Metrics
from shared.api_config import ApiConfig
from shared.config import EngineConfig
from shared.engine import EngineClient
from shared.errors import RequestError
from shared.messages import DEAD_SECONDS
from shared.model_info import ModelInfo

SILENT_SECONDS = DEAD_SECONDS + 2.0  # by then the engine client itself should have noticed
TICK_SECONDS = 1.0


class Gateway:
    """One api process."""

    def __init__(self, engine: EngineClient, config: ApiConfig) -> None:
        self.engine = engine
        self.config = config
        self.metrics = Metrics(engine.state)
        self.admission = Admission(config.max_concurrent_requests, config.max_parked_requests)
        self.draining = False  # a stop was asked for: nothing new is taken
        self.closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done: end what still runs
        self._was_ready = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keeps the once-a-second figures up to date."""
        ticker = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            ticker.cancel()

    async def _tick(self) -> None:
        while True:
            self._was_ready |= self.engine.state.ready
            self.metrics.tick(time.monotonic())
            await asyncio.sleep(TICK_SECONDS)

    def drain(self) -> None:
        """Takes no new requests from now on."""
        self.draining = True

    def close(self) -> None:
        """Ends the requests that still run, each with an error."""
        if not self.closing.done():
            self.closing.set_result(None)

    def trouble(self) -> str:
        """Why the server cannot serve at this moment, for people; "" when it can."""
        state = self.engine.state
        if self.draining:
            return "shutting down"
        if not state.ready or state.stats is None:
            return state.reason or "not ready"
        silence = time.monotonic() - state.heard
        if silence > SILENT_SECONDS:
            return f"no word from the scheduler for {silence:.0f} s"
        for group in state.stats.groups:
            if group.stalled > self.config.stall_seconds:
                return f"worker group {group.group} owes a step's result for {group.stalled:.0f} s"
        return ""

    def served(self) -> tuple[EngineConfig, ModelInfo]:
        """The engine and the model. Raises RequestError (503) until the server has been ready for the first time."""
        state = self.engine.state
        self._was_ready |= state.ready
        if self.draining:
            raise unavailable("shutting down")
        if not self._was_ready or state.engine is None or state.model is None:
            raise unavailable(state.reason or "not ready")
        return state.engine, state.model

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. Raises RequestError (404) for a model that is not served; none named: ours."""
        if asked:
            self.check_model(asked)
        return self.served()[0].names[0]

    def check_model(self, name: str) -> None:
        """Raises RequestError (404) when no model is served under this name."""
        names = self.served()[0].names
        if name not in names:
            raise RequestError(
                f"The model {shorten(name, 200)!r} does not exist; this server has {', '.join(names)}.",
                param="model",
                code="model_not_found",
                status=404,
            )

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Holds a place for a request. Raises RequestError (429, 503).

        A request that comes while the engine recovers is taken and waits, up to a bound.
        """
        with self.admission.enter(parked=not self.engine.state.ready):
            yield


def unavailable(reason: str) -> RequestError:
    """The server cannot serve now, but may soon."""
    return RequestError(
        f"The server is not ready: {reason}.", status=503, kind="server_error", code="not_ready", retry_after=2
    )

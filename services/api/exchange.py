"""The work for one connection, which ends as soon as the client leaves or the server closes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from services.api.body import ClientGone
from shared.errors import RequestError

T = TypeVar("T")


async def run_while_connected(
    work: Coroutine[Any, Any, T],
    receive: Receive,
    closing: asyncio.Future[None],
    idle: Callable[[], Awaitable[float]] | None = None,
    first_idle: float = 0.0,
) -> T:
    """Runs `work` to its end and returns its result; the request's body has been read before.

    `idle` is called after `first_idle` seconds and from then on after as many as it returned. Raises ClientGone when
    the client leaves, RequestError (503) once `closing` is done; by then `work` has ended.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    ends: set[asyncio.Future[Any]] = {task, gone, closing}
    wait = first_idle if idle else None
    try:
        while True:
            await asyncio.wait(ends, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                raise ClientGone
            if closing.done():
                raise RequestError("The server is shutting down.", status=503, kind="server_error", retry_after=1)
            assert idle is not None
            wait = await idle()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # retrieved, lest asyncio complains of it


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

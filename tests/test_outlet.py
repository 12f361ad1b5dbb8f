"""ASGI messages from plain functions: written at once, or one after the other when the server makes them wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from starlette.types import Message

from services.api.outlet import Outlet
from shared.turn import Turn


class Server:
    """Takes messages while it is `open`; raises `fault` when one is set."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.room = asyncio.Event()
        self.room.set()
        self.fault: Exception | None = None
        self.told: list[str] = []
        self.turn = Turn()
        self.outlet = Outlet(self.send, self.turn, lambda: self.told.append("room"))

    async def send(self, message: Message) -> None:
        await self.room.wait()
        if self.fault is not None:
            raise self.fault
        self.taken.append(message["type"])

    def write(self, *names: str) -> None:
        self.outlet.write(*[{"type": name} for name in names])


async def turns(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_with_room_all_is_taken_in_the_same_turn() -> None:
    server = Server()
    server.write("start", "a")
    assert server.outlet.busy
    assert server.taken == []
    await asyncio.sleep(0)
    assert server.taken == ["start", "a"]
    assert server.outlet.started
    assert not server.outlet.busy
    await server.outlet.drained()
    assert server.told == []


async def test_without_room_it_is_busy_and_tells_of_room() -> None:
    server = Server()
    server.room.clear()
    server.write("start", "a", "b")
    await asyncio.sleep(0)
    assert server.outlet.busy
    assert not server.outlet.started
    assert server.taken == []
    server.room.set()
    await server.outlet.drained()
    await turns(lambda: not server.outlet.busy)
    assert (server.taken, server.told) == (["start", "a", "b"], ["room"])


@pytest.mark.parametrize("waits", [False, True])
async def test_a_fault_is_told_and_raised_where_the_end_is_awaited(waits: bool) -> None:
    server = Server()
    server.fault = RuntimeError("broken")
    if waits:
        server.room.clear()
    server.write("start")
    await asyncio.sleep(0)
    server.room.set()
    await turns(lambda: server.told == ["room"])
    with pytest.raises(RuntimeError, match="broken"):
        await server.outlet.drained()


async def test_closing_writes_what_can_be_written_and_gives_up_the_rest() -> None:
    server = Server()
    server.write("start")
    server.outlet.close()
    assert server.taken == ["start"]
    server.room.clear()
    server.write("a")
    await asyncio.sleep(0)
    server.outlet.close()
    await turns(lambda: server.outlet._waiting is None)
    server.room.set()
    await asyncio.sleep(0)
    assert (server.taken, server.told) == (["start"], [])

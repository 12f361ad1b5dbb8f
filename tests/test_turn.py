"""Work put off to the end of a turn."""

from __future__ import annotations

import asyncio

from shared.turn import Turn


async def test_calls_come_at_the_end_of_the_turn_and_what_they_ask_for_after_all_others() -> None:
    turn, said = Turn(), []

    def make(name: str) -> None:
        said.append(f"make {name}")
        turn.call(lambda: said.append(f"write {name}"))

    for name in "ab":
        turn.call(lambda name=name: make(name))  # type: ignore[misc]
    assert said == []
    await asyncio.sleep(0)
    assert said == ["make a", "make b", "write a", "write b"]
    turn.call(lambda: said.append("next"))
    await asyncio.sleep(0)
    assert said[4:] == ["next"]

"""Waking a poll loop."""

from __future__ import annotations

import select
import signal
import threading
from collections.abc import Iterator

import pytest

from shared.wake import Wake, on_stop


@pytest.fixture
def wake() -> Iterator[Wake]:
    made = Wake()
    yield made
    made.close()


def pending(wake: Wake, seconds: float = 0.0) -> bool:
    return bool(select.select([wake.fd], [], [], seconds)[0])


def test_a_wake_up_lasts_until_it_is_cleared(wake: Wake) -> None:
    assert not pending(wake)
    wake.clear()
    threading.Thread(target=wake.set).start()
    assert pending(wake, 10.0)
    assert pending(wake)
    wake.clear()
    assert not pending(wake)


@pytest.mark.parametrize("times", [4096, 100_000])  # a full read, and more than the pipe holds
def test_many_are_one(wake: Wake, times: int) -> None:
    for _ in range(times):
        wake.set()
    wake.clear()
    assert not pending(wake)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop(wake: Wake, number: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        on_stop(wake.set)
        signal.raise_signal(number)
        assert pending(wake, 10.0)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

"""One prompt being answered: what the API's coroutine holds while tokens arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from shared.errors import RequestError
from shared.turn import Turn


class SampleDelta(msgspec.Struct, gc=False):
    """What is new of one sample since the last delta. `finish_reason` is set on its last one."""

    index: int
    text: str
    ids: list[int]
    finish_reason: str | None = None  # None, "stop" or "length"
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it; None for EOS


class Sample:
    """One of the n continuations of a prompt, as far as it has been decoded."""

    __slots__ = ("_known", "_new", "_reported", "cached_tokens", "finish_reason", "ids", "index", "stop_reason")

    def __init__(self, index: int) -> None:
        self.index = index
        self.ids: list[int] = []  # output ids whose text is known; they count as completion tokens
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.cached_tokens = 0  # prompt tokens its first attempt read from the prefix cache
        self._known: list[str] = []  # text handed out in deltas
        self._new: list[str] = []  # text not yet handed out
        self._reported = 0  # ids handed out

    @property
    def text(self) -> str:
        """The text so far; what could be the beginning of a stop string is held back."""
        self._known = ["".join(self._known)]
        return "".join([*self._known, *self._new])

    def grow(self, text: str, ids: list[int]) -> None:
        """Appends decoded text and the ids it came from."""
        if text:
            self._new.append(text)
        self.ids += ids

    def take(self) -> SampleDelta:
        """Everything since the last call."""
        text = ""
        if self._new:
            text = self._new[0] if len(self._new) == 1 else "".join(self._new)
            self._known.append(text)
            self._new = []
        ids = self.ids[self._reported :]
        self._reported = len(self.ids)
        return SampleDelta(self.index, text, ids, self.finish_reason, self.stop_reason)


class Generation:
    """An asynchronous iterator over the deltas of a prompt's n samples, for one consumer.

    A slow consumer finds everything that came meanwhile merged into one delta per sample. Raises RequestError when the
    engine refuses or fails the request; the deltas before it are delivered first. Leaving early: call `abort`.

    A consumer that can do without a coroutine per stream listens instead: it is called at the end of each turn of the
    event loop that brought something, and takes what there is.
    """

    def __init__(self, n: int, on_abort: Callable[[], None], turn: Turn) -> None:
        self.samples = [Sample(index) for index in range(n)]
        self._on_abort = on_abort
        self._turn = turn
        self._listener: Callable[[], None] | None = None
        self._told = False  # the listener will be called at the end of this turn
        self._fresh: dict[int, None] = {}  # indexes of samples with something to report, in order
        self._live = n
        self.error: RequestError | None = None  # why the request has failed
        self._waiter: asyncio.Future[None] | None = None
        self._wants_end = False

    @property
    def finished(self) -> bool:
        """All samples have ended, or the request has failed or been aborted."""
        return self._live == 0

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[SampleDelta]:
        """Everything new since the last call, one delta per sample that has any."""
        while not self._fresh:
            if self.error is not None:
                raise self.error
            if self._live == 0:
                raise StopAsyncIteration
            await self._news()
        return self.take()

    def take(self) -> list[SampleDelta]:
        """What there is now: one delta per sample that has any."""
        samples = self.samples
        deltas = [samples[index].take() for index in self._fresh]
        self._fresh.clear()
        return deltas

    def listen(self, listener: Callable[[], None] | None) -> None:
        """From now on `listener` is called, also for what has come already; None: no more."""
        self._listener = listener
        if self._fresh or not self._live:
            self._tell()

    async def result(self) -> list[Sample]:
        """All samples once they have ended, without a wake-up per step. Raises RequestError."""
        self._wants_end = True
        try:
            while self._live:
                await self._news()
        finally:
            self._wants_end = False
        if self.error is not None:
            raise self.error
        return self.samples

    def abort(self) -> None:
        """Gives the request up and frees its blocks within a step. Idempotent; no-op once finished."""
        if self._live:
            self._on_abort()
            self._close()

    def grow(self, index: int, text: str, ids: list[int]) -> None:
        """Engine side: a sample's new text and ids."""
        self.samples[index].grow(text, ids)
        self._fresh[index] = None
        if not self._wants_end:
            self._tell()

    def finish(self, index: int, reason: str, stop_reason: str | int | None) -> None:
        """Engine side: a sample has ended."""
        sample = self.samples[index]
        sample.finish_reason, sample.stop_reason = reason, stop_reason
        self._fresh[index] = None
        self._live -= 1
        if self._live == 0 or not self._wants_end:
            self._tell()

    def fail(self, error: RequestError) -> None:
        """Engine side: the request has failed as a whole."""
        if self._live:
            self.error = error
            self._close()

    def _close(self) -> None:
        self._live = 0
        self._tell()

    def _tell(self) -> None:
        """Wakes the consumer, or puts the listener on the list of this turn."""
        if self._listener is not None:
            if not self._told:
                self._told = True
                self._turn.call(self._deliver)
        elif self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            if not waiter.done():
                waiter.set_result(None)

    def _deliver(self) -> None:
        self._told = False
        if self._listener is not None:
            self._listener()

    def _news(self) -> asyncio.Future[None]:
        """Done at the next wake-up."""
        assert self._waiter is None, "a generation has one consumer"
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

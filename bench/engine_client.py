"""CPU time of the engine client per output token, against peers in threads: `python -m bench.engine_client`.

Only the client's own thread is counted. Each step brings one token for every stream; the consumers await every delta.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from array import array

import uvloop

from shared.engine import EngineClient, Generation
from shared.messages import Request
from shared.sampling import SamplingParams
from tests.engine_fakes import FakeScheduler, FakeTokenizer

LETTERS = b"the quick brown fox jumps over the lazy dog "


def answer(request: Request) -> list[int]:
    """As many ids as the request asks for."""
    count = request.params.max_tokens or 0
    return [LETTERS[i % len(LETTERS)] for i in range(count)]


async def consume(generation: Generation) -> int:
    """Reads a stream to its end; the number of wake-ups."""
    return sum([1 async for _ in generation])


async def lead(generation: Generation, scheduler: FakeScheduler) -> int:
    """Like `consume`, and lets the scheduler take its next step whenever this stream has got its token."""
    wake_ups = 0
    scheduler.set(allowed=1)
    async for _ in generation:
        wake_ups += 1
        scheduler.set(allowed=wake_ups + 1)
    return wake_ups


async def measure(streams: int, tokens: int, stop: list[str]) -> tuple[float, float]:
    """Microseconds of CPU per token, and tokens per wake-up of a consumer."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = FakeTokenizer(f"ipc://{folder}/t")
        scheduler = FakeScheduler(f"ipc://{folder}", answer, [tokenizer], allowed=0)
        client = EngineClient(f"ipc://{folder}")
        await client.start()
        await client.wait_ready()
        params = SamplingParams(max_tokens=tokens, seed=1, stop=stop)
        generations = [client.generate(array("i", range(64)), params) for _ in range(streams)]
        await scheduler.until(lambda: len(scheduler.running) == streams)
        start = time.thread_time()
        *others, last = generations
        wake_ups = sum(await asyncio.gather(*map(consume, others), lead(last, scheduler)))
        seconds = time.thread_time() - start
        await client.close()
        scheduler.kill()
        tokenizer.kill()
    return seconds * 1e6 / (streams * tokens), streams * tokens / wake_ups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200, help="output tokens per stream")
    parser.add_argument("--stop", action="append", default=[], help="a stop string to look for (repeatable)")
    arguments = parser.parse_args()
    for streams in (1, 32, 256):
        cost, merged = uvloop.run(measure(streams, arguments.tokens, arguments.stop))
        print(f"{streams:4d} streams: {cost:6.1f} µs of CPU per token, {merged:.2f} tokens per wake-up")


if __name__ == "__main__":
    main()

"""CPU time of the engine client per output token, its peers in another process: `python -m bench.engine_client`.

Only the client's thread is counted, with consumers that await every delta. A step brings one token for every stream;
the next one follows when its ids have arrived at the tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from array import array

import uvloop

from shared.engine import EngineClient, Generation
from shared.messages import Decode, Message, Request
from shared.sampling import SamplingParams
from tests.engine_fakes import FakeScheduler, FakeTokenizer

LETTERS = b"the quick brown fox jumps over the lazy dog "


def answer(request: Request) -> list[int]:
    """As many ids as the request asks for."""
    count = request.params.max_tokens or 0
    return [LETTERS[i % len(LETTERS)] for i in range(count)]


class Pacemaker(FakeTokenizer):
    """Lets the scheduler take its next step with each Decode that carries the newest ids."""

    scheduler: FakeScheduler
    streams: int

    def answer(self, message: Message) -> Message:
        """The real answer; the next step begins once all streams' ids of this one are here."""
        if isinstance(message, Decode):
            self.items += len(message.items)
            if self.items >= self.streams:
                self.items = 0
                self.scheduler.set(allowed=self.scheduler.allowed + 1)
        return super().answer(message)

    items = 0


def serve_peers(folder: str, streams: int) -> None:
    """The other process: runs until its standard input closes."""
    tokenizer = Pacemaker(f"ipc://{folder}/t")
    tokenizer.streams = streams
    tokenizer.scheduler = scheduler = FakeScheduler(f"ipc://{folder}", answer, [tokenizer], allowed=0)
    print("ready", flush=True)
    sys.stdin.readline()
    scheduler.set(allowed=1)
    sys.stdin.read()


async def consume(generation: Generation) -> int:
    """Reads a stream to its end; the number of wake-ups."""
    return sum([1 async for _ in generation])


async def measure(folder: str, peers: subprocess.Popen[bytes], streams: int, tokens: int, stop: list[str]) -> str:
    """One line: microseconds of CPU per token, and tokens per wake-up of a consumer."""
    assert peers.stdin is not None
    client = EngineClient(f"ipc://{folder}")
    await client.start()
    await client.wait_ready()
    params = SamplingParams(max_tokens=tokens, seed=1, stop=stop)
    tasks = [asyncio.create_task(consume(client.generate(array("i", range(64)), params))) for _ in range(streams)]
    await asyncio.sleep(0.5)
    start = time.thread_time()
    peers.stdin.write(b"go\n")
    peers.stdin.flush()
    wake_ups = sum(await asyncio.gather(*tasks))
    cost = (time.thread_time() - start) * 1e6 / (streams * tokens)
    await client.close()
    return (
        f"{streams:4d} streams: {cost:6.1f} µs of CPU per token, {streams * tokens / wake_ups:.2f} tokens per wake-up"
    )


def main() -> None:
    """Measures 1, 32 and 256 streams."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=300, help="output tokens per stream")
    parser.add_argument("--stop", action="append", default=[], help="a stop string to look for (repeatable)")
    parser.add_argument("--peers", help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, action="append", help="concurrent streams (repeatable)")
    arguments = parser.parse_args()
    if arguments.peers:
        serve_peers(arguments.peers, arguments.streams[0])
        return
    for streams in arguments.streams or (1, 32, 256):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "bench.engine_client", "--peers", folder, "--streams", str(streams)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peers:
                assert peers.stdout is not None
                peers.stdout.readline()
                print(uvloop.run(measure(folder, peers, streams, arguments.tokens, arguments.stop)), flush=True)
                peers.terminate()


if __name__ == "__main__":
    main()

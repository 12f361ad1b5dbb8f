"""Many HTTP streams for the least CPU: one thread, one epoll, and no look at the events but for their end."""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

END = b"0\r\n\r\n"  # the last chunk of a body
TOKENS = re.compile(rb'"completion_tokens":(\d+)')
TAIL = 400  # bytes kept of an answer: its usage and its end
READ = 1 << 16


@dataclass
class Tally:
    """What a run of requests came to."""

    seconds: float = 0.0
    cpu: float = 0.0  # seconds of this client's own
    requests: int = 0
    tokens: int = 0
    reads: int = 0
    events: int = 0


class _Stream:
    """One connection, kept alive from request to request."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.tail = b""

    def send(self, request: bytes) -> None:
        self.tail = b""
        self.socket.sendall(request)


class Swarm:
    """Streams of one server."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)

    def run(self, requests: Sequence[bytes], concurrency: int) -> Tally:
        """Sends each request, at most so many at once. Raises RuntimeError for an answer that is not whole."""
        tally = Tally()
        waiting = list(reversed(requests))
        streams = [_Stream(self._address) for _ in range(min(concurrency, len(requests)))]
        by_fd = {stream.socket.fileno(): stream for stream in streams}
        with select.epoll() as poller:
            for fd in by_fd:
                poller.register(fd, select.EPOLLIN)
            began, own = time.perf_counter(), time.process_time()
            for stream in streams:
                stream.send(waiting.pop())
            while by_fd:
                for fd, _ in poller.poll():
                    stream = by_fd[fd]
                    if not self._read(stream, tally):
                        continue
                    if waiting:
                        stream.send(waiting.pop())
                    else:
                        poller.unregister(fd)
                        by_fd.pop(fd).socket.close()
            tally.seconds, tally.cpu = time.perf_counter() - began, time.process_time() - own
        return tally

    def _read(self, stream: _Stream, tally: Tally) -> bool:
        """Takes what has come; True at the end of the answer."""
        data = stream.socket.recv(READ)
        if not stream.tail and not data.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"the server refused: {data!r}")
        tail = stream.tail = stream.tail[-TAIL:] + data
        tally.reads += 1
        tally.events += data.count(b"data: ")
        if not tail.endswith(END):
            if not data:
                raise RuntimeError(f"the stream broke off: {tail!r}")
            return False
        found = TOKENS.search(tail)
        if found is None:
            raise RuntimeError(f"no usage at the end of the stream: {tail!r}")
        tally.tokens += int(found[1])
        tally.requests += 1
        return True

    def leave_early(self, requests: Sequence[bytes], concurrency: int) -> None:
        """Sends each request and closes its connection at the first bytes of the answer."""
        waiting = list(reversed(requests))
        while waiting:
            streams = [_Stream(self._address) for _ in range(min(concurrency, len(waiting)))]
            for stream in streams:
                stream.send(waiting.pop())
            for stream in streams:
                stream.socket.recv(READ)
                stream.socket.close()

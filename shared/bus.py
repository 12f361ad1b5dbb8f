"""The bus: a ROUTER for whoever listens, a DEALER for whoever connects, one message struct per frame.

    scheduler address      front (api, tokenizer)     back (workers)
    tcp://host:port        tcp://host:port            tcp://host:port+1
    ipc:///folder          ipc:///folder/front        ipc:///folder/back

Sends never block: False says that the peer is gone or has stopped reading. Receiving drains the socket; a lost
connection shows in the same stream as `Link.DOWN`, within milliseconds of a crash. Links belong to one thread.
"""

from __future__ import annotations

import enum
import logging
import select
import struct
import time
import uuid
from collections.abc import Iterable

import msgspec
import zmq

from shared.addresses import bind, curve_client, curve_server, is_tcp
from shared.messages import DEAD_SECONDS, HEARTBEAT_SECONDS, Message, decode, encode

log = logging.getLogger(__name__)

HIGH_WATER = 8192  # messages queued per peer and direction
MAX_MESSAGE = 512 << 20  # bytes; a peer that announces more is cut off
DRAIN_LIMIT = 1024  # messages taken at once, so that a flood cannot hold the loop
RECONNECT_MS = (20, 500)

_POLLIN, _NOBLOCK, _SRCFD = int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.SRCFD)  # zmq's own are enums, and slow
_MORE = int(zmq.SNDMORE) | _NOBLOCK
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_MONITORED = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED


class Link(enum.Enum):
    """What happened to a connection; stands in the stream between messages."""

    UP = "up"  # DealerLink only: connected, for the first time or again
    DOWN = "down"


def new_identity() -> bytes:
    """A socket identity, fresh for every process start."""
    return uuid.uuid4().hex.encode()


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a receive would find something now. To ask costs less than to be refused."""
    return bool(zmq.zmq_poll([(socket, _POLLIN)], 0))


class Connections:
    """Which peers spoke on which file descriptor, so that a closed descriptor names the peer that is gone.

    Messages and monitor events come by different ways: a descriptor can be heard reused before its close is seen, and a
    last message can follow the close. A connection that opens, says nothing and closes in such a moment has the next
    one taken for lost; that costs its peer a needless Hello.
    """

    def __init__(self) -> None:
        self._speakers: dict[int, list[bytes]] = {}  # by descriptor, oldest first; all whose close is not seen yet
        self._fd: dict[bytes, int] = {}  # a peer's newest descriptor
        self._open: set[int] = set()  # as far as the monitor tells
        self._left: dict[int, bytes] = {}  # by closed descriptor: who had it last

    def heard(self, peer: bytes, fd: int) -> bytes | None:
        """A message came from `peer` on `fd`. Returns the peer that had the descriptor before, and so is gone."""
        speakers = self._speakers.setdefault(fd, [])
        if speakers and speakers[-1] == peer:
            return None
        if not speakers and fd not in self._open and self._left.get(fd) == peer:
            return None  # the last words of a peer known to be gone
        speakers.append(peer)
        self._fd[peer] = fd
        return self._gone(speakers[-2], fd) if len(speakers) > 1 else None

    def accepted(self, fd: int) -> None:
        """The monitor saw a new connection on `fd`."""
        self._open.add(fd)

    def closed(self, fd: int) -> bytes | None:
        """The monitor saw `fd` close. Returns the peer that is gone with it, if any."""
        self._open.discard(fd)
        speakers = self._speakers.get(fd)
        if not speakers:
            return None
        peer = self._left[fd] = speakers.pop(0)
        return self._gone(peer, fd)

    def _gone(self, peer: bytes, fd: int) -> bytes | None:
        if self._fd.get(peer) != fd:
            return None  # told already, or connected anew
        del self._fd[peer]
        return peer


def _source(frame: zmq.Frame) -> int:
    """The descriptor a frame came in on; -1 where the peer speaks a ZMTP too old to have it, so none of ours."""
    try:
        return int(frame.get(_SRCFD))
    except zmq.ZMQError:
        return -1


class _Socket:
    """A zmq socket with its monitor."""

    def __init__(self, kind: int, context: zmq.Context[zmq.Socket[bytes]] | None) -> None:
        self.socket = (context or zmq.Context.instance()).socket(kind)
        self.socket.linger = 0
        self.socket.sndhwm = self.socket.rcvhwm = HIGH_WATER
        self.socket.maxmsgsize = MAX_MESSAGE
        self.socket.handshake_ivl = int(DEAD_SECONDS * 1000)
        self.socket.heartbeat_ivl = int(HEARTBEAT_SECONDS * 1000)
        self.socket.heartbeat_timeout = int(DEAD_SECONDS * 1000)
        self.monitor = self.socket.get_monitor_socket(_MONITORED)
        self._settled = False  # nothing was left to be received, and nothing has been sent since
        self._received = False  # `recv` has been called
        self._complained: set[bytes] = set()

    def descriptors(self) -> list[int]:
        """What to watch for reading. They tell of what is new alone: ask `pending` before going to sleep."""
        return [int(self.socket.get(zmq.FD)), int(self.monitor.get(zmq.FD))]

    def pending(self) -> bool:
        """Whether messages are there that the descriptors may not tell of: sending can swallow their signal."""
        if not self._settled:
            self._settled = self._received and not readable(self.socket)
        return not self._settled

    def close(self) -> None:
        """Closes the socket; what was not sent yet is lost."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=0)

    def flush(self, seconds: float) -> None:
        """Closes the socket once what is queued has left, after `seconds` at most; `finish` waits for it."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=int(seconds * 1000))

    def _messages(self) -> Iterable[list[zmq.Frame]]:
        """The frames of each message that has come."""
        socket = self.socket
        self._settled, self._received = False, True
        for _ in range(DRAIN_LIMIT):
            if not self.pending():
                return
            frames = [socket.recv(_NOBLOCK, copy=False)]
            while frames[-1].more:
                frames.append(socket.recv(_NOBLOCK, copy=False))
            yield frames

    def _events(self) -> Iterable[tuple[int, int]]:
        """Pending monitor events: what, and the file descriptor or error number."""
        while readable(self.monitor):
            event, value = struct.unpack("=Hi", self.monitor.recv_multipart(zmq.NOBLOCK)[0])
            if event & _HANDSHAKE_FAILED:
                self._complain(b"handshake", "a handshake failed: do all processes have the same PAGEBUS_BUS_KEY?")
            yield event, value

    def _decode(self, peer: bytes, frames: list[zmq.Frame]) -> Message | None:
        try:
            if len(frames) != 1:
                raise ValueError(f"{len(frames)} frames instead of one")
            message: Message = decode(frames[0].buffer)
            return message
        except (ValueError, msgspec.MsgspecError) as error:
            self._complain(peer, f"dropping what is no message from {peer.decode(errors='replace')}: {error}")
            return None

    def _complain(self, about: bytes, text: str) -> None:
        """Logs once per cause; a flood of bad input must not flood the log."""
        if about not in self._complained and len(self._complained) < 1000:
            self._complained.add(about)
            log.warning("%s", text)


class RouterLink(_Socket):
    """The listening end. `address` becomes the endpoint bound (a tcp port may be given as `*`).

    Raises StartupError, with the address, when it cannot be bound.
    """

    def __init__(self, address: str, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        super().__init__(zmq.ROUTER, context)
        self.socket.router_mandatory = True
        self.socket.router_handover = True
        self.socket.backlog = 1024
        self._connections = Connections()
        try:
            if is_tcp(address):
                curve_server(self.socket)
            self.address = bind(self.socket, address)
        except BaseException:
            self.close()
            raise

    def recv(self) -> list[tuple[bytes, Message | Link]]:
        """All that has come, with the sender's identity; `Link.DOWN` for a peer whose connection closed."""
        out: list[tuple[bytes, Message | Link]] = []
        for head, *frames in self._messages():
            peer = head.bytes
            message = self._decode(peer, frames)
            if message is None:
                continue
            gone = self._connections.heard(peer, _source(head))
            if gone is not None:
                out.append((gone, Link.DOWN))
            out.append((peer, message))
        for event, fd in self._events():
            if event == zmq.EVENT_ACCEPTED:
                self._connections.accepted(fd)
            elif event == zmq.EVENT_DISCONNECTED:
                lost = self._connections.closed(fd)
                if lost is not None:
                    out.append((lost, Link.DOWN))
        return out

    def send(self, peer: bytes, message: Message) -> bool:
        """Queues a message; False when the peer is not connected or its queue is full."""
        self._settled = False
        try:
            self.socket.send(peer, _MORE)
            self.socket.send(encode(message), _NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True


class DealerLink(_Socket):
    """The connecting end. It reconnects by itself; what was queued for a lost connection is dropped with it."""

    def __init__(self, address: str, identity: bytes, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        super().__init__(zmq.DEALER, context)
        self.address = address
        self._peer = address.encode()
        self.connected = False
        self.socket.identity = identity
        self.socket.immediate = True
        self.socket.reconnect_ivl, self.socket.reconnect_ivl_max = RECONNECT_MS
        if is_tcp(address):
            curve_client(self.socket)
        self.socket.connect(address)

    def recv(self) -> list[Message | Link]:
        """All that has come, and `Link.UP` and `Link.DOWN` as the connection comes and goes."""
        out: list[Message | Link] = []
        for frames in self._messages():
            message = self._decode(self._peer, frames)
            if message is not None:
                out.append(message)
        for event, _ in self._events():
            up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if up or (event == zmq.EVENT_DISCONNECTED and self.connected):
                self.connected = up
                out.append(Link.UP if up else Link.DOWN)
        return out

    def send(self, message: Message) -> bool:
        """Queues a message; False when `recv` has not told of a connection, or when the queue is full."""
        if not self.connected:
            return False
        self._settled = False
        try:
            self.socket.send(encode(message), _NOBLOCK)
        except zmq.Again:
            return False
        return True


def finish() -> None:
    """Waits until all links, which must be closed, have sent what they were to flush. For the end of a process."""
    zmq.Context.instance().term()


class Waiter:
    """Sleeps until a link, or another file descriptor, has something to read."""

    def __init__(self, *links: _Socket, fds: Iterable[int] = ()) -> None:
        self._links = links
        self._owners: dict[int, _Socket | int] = {fd: link for link in links for fd in link.descriptors()}
        self._owners.update((fd, fd) for fd in fds)
        self._epoll = select.epoll()
        for fd in self._owners:
            self._epoll.register(fd, select.EPOLLIN)

    def wait(self, seconds: float) -> set[_Socket | int]:
        """The links and descriptors with something to read, empty after `seconds` (to the next millisecond)."""
        ready: set[_Socket | int] = {link for link in self._links if link.pending()}
        for fd, _ in self._epoll.poll(0 if ready else max(seconds, 0)):
            ready.add(self._owners[fd])
        return ready

    def until(self, deadline: float) -> set[_Socket | int]:
        """Like `wait`, up to a time of `time.monotonic`."""
        return self.wait(deadline - time.monotonic())

"""Links over real sockets: delivery, lost peers, bad input, addresses, encryption."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from shared.addresses import back, front, tokenizer_endpoint
from shared.bus import Connections, DealerLink, Link, RouterLink, Waiter, new_identity
from shared.bus_async import AsyncDealer
from shared.errors import StartupError
from shared.messages import Abort, Heartbeat, Message, Unknown

PATIENCE = 10.0  # seconds; only a failing test waits for so long

PEER = """
import sys, time
from shared.bus import DealerLink, Waiter
from shared.messages import Heartbeat
link = DealerLink(sys.argv[1], sys.argv[2].encode())
waiter = Waiter(link)
while True:
    waiter.wait(1)
    link.recv()
    link.send(Heartbeat(epoch=int(sys.argv[3])))
    time.sleep(0.01)
"""


class Ends:
    """Both ends of the bus, for a test."""

    def __init__(self) -> None:
        self.links: list[Any] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def router(self, address: str) -> RouterLink:
        return self._add(RouterLink(address))

    def dealer(self, address: str, identity: bytes = b"") -> DealerLink:
        return self._add(DealerLink(address, identity or new_identity()))

    def peer(self, address: str, name: str, number: int = 1) -> subprocess.Popen[bytes]:
        self.processes.append(subprocess.Popen([sys.executable, "-c", PEER, address, name, str(number)]))
        return self.processes[-1]

    def _add(self, link: Any) -> Any:
        self.links.append(link)
        return link


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for process in made.processes:
        process.kill()
        process.wait()
    for link in made.links:
        link.close()


@pytest.fixture(params=["ipc", "tcp", "tcp+curve"])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tcp+curve":
        monkeypatch.setenv("PAGEBUS_BUS_KEY", "a secret")
    return f"ipc://{tmp_path}/front" if request.param == "ipc" else "tcp://127.0.0.1:*"


def collect(link: Any, enough: Callable[[list[Any]], bool]) -> list[Any]:
    """Receives until it is enough."""
    waiter, got, deadline = Waiter(link), [], time.monotonic() + PATIENCE
    while not enough(got):
        assert time.monotonic() < deadline, f"only got {got[-20:]}"
        waiter.wait(0.2)
        got += link.recv()
    return got


def until(*wanted: Any) -> Callable[[list[Any]], bool]:
    return lambda got: all(item in got for item in wanted)


def connect(link: DealerLink) -> DealerLink:
    assert collect(link, until(Link.UP)) == [Link.UP]
    return link


def test_messages_travel_both_ways(ends: Ends, address: str) -> None:
    router = ends.router(address)
    dealer = connect(ends.dealer(router.address, b"me"))
    assert dealer.send(Abort(ids=[1, 2]))
    assert collect(router, until((b"me", Abort(ids=[1, 2])))) == [(b"me", Abort(ids=[1, 2]))]
    assert router.send(b"me", Heartbeat(epoch=3))
    assert collect(dealer, until(Heartbeat(epoch=3))) == [Heartbeat(epoch=3)]


def test_sends_to_nobody_are_refused_at_once(ends: Ends, tmp_path: Path) -> None:
    assert not ends.router(f"ipc://{tmp_path}/front").send(b"nobody", Unknown())
    assert not ends.dealer(f"ipc://{tmp_path}/other").send(Unknown())


def test_a_full_queue_refuses_and_delivers_the_rest(ends: Ends, tmp_path: Path) -> None:
    router = ends.router(f"ipc://{tmp_path}/front")
    dealer = connect(ends.dealer(router.address))
    sent = 0
    while dealer.send(Abort(ids=list(range(100)))):
        sent += 1
        assert sent < 1_000_000
    got = collect(router, lambda got: len(got) >= sent)
    assert len(got) == sent


def test_a_killed_peer_shows_at_once(ends: Ends, address: str) -> None:
    router = ends.router(address)
    process = ends.peer(router.address, "victim")
    collect(router, until((b"victim", Heartbeat(epoch=1))))
    process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    collect(router, until((b"victim", Link.DOWN)))
    assert time.monotonic() - killed < 1.0  # well before any heartbeat is missed
    while router.send(b"victim", Unknown()):  # libzmq tells of the loss a moment before it acts on it
        assert time.monotonic() - killed < 1.0


def test_a_dealer_sees_the_router_go_and_come(ends: Ends, address: str, tmp_path: Path) -> None:
    router = ends.router(address)
    dealer = connect(ends.dealer(router.address, b"me"))
    router.close()
    assert collect(dealer, until(Link.DOWN)) == [Link.DOWN]
    assert not dealer.send(Unknown())
    again = ends.router(router.address)
    assert collect(dealer, until(Link.UP)) == [Link.UP]
    assert dealer.send(Unknown())
    collect(again, until((b"me", Unknown())))


def test_messages_for_a_lost_connection_are_not_delivered_to_the_next(ends: Ends, tmp_path: Path) -> None:
    router = ends.router(f"ipc://{tmp_path}/front")
    dealer = connect(ends.dealer(router.address, b"me"))
    dealer.send(Abort(ids=[1]))
    collect(router, until((b"me", Abort(ids=[1]))))
    router.close()
    while dealer.connected:
        dealer.send(Abort(ids=[2]))
        dealer.recv()
    again = ends.router(router.address)
    connect(dealer)
    dealer.send(Abort(ids=[3]))
    assert collect(again, until((b"me", Abort(ids=[3])))) == [(b"me", Abort(ids=[3]))]


def test_garbage_costs_nobody_anything(ends: Ends, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    router = ends.router(f"ipc://{tmp_path}/front")
    bad, good = connect(ends.dealer(router.address, b"bad")), connect(ends.dealer(router.address, b"good"))
    chance = random.Random(1)
    for _ in range(200):
        bad.socket.send(chance.randbytes(chance.randrange(64)))
    bad.socket.send(b"\x92\xa7Unheard\x01")
    bad.socket.send_multipart([b"", b"\x91\xa7Unknown"])
    bad.socket.send_multipart([b"\x91\xa7Unknown"] * 3)
    bad.send(Unknown())
    good.send(Unknown())
    got = collect(router, until((b"bad", Unknown()), (b"good", Unknown())))
    assert sorted(got) == [(b"bad", Unknown()), (b"good", Unknown())]
    assert len([record for record in caplog.records if "no message" in record.getMessage()]) == 1


def test_raw_bytes_on_the_socket_cost_nobody_anything(ends: Ends) -> None:
    router = ends.router("tcp://127.0.0.1:*")
    dealer = connect(ends.dealer(router.address, b"good"))
    port = int(router.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        dealer.send(Unknown())
        got = collect(router, until((b"good", Unknown())))
        assert [event for event in got if event[1] is not Link.DOWN] == [(b"good", Unknown())]


def test_a_second_holder_of_an_identity_takes_over(ends: Ends, tmp_path: Path) -> None:
    router = ends.router(f"ipc://{tmp_path}/front")
    first = connect(ends.dealer(router.address, b"same"))
    first.send(Heartbeat(epoch=1))
    collect(router, until((b"same", Heartbeat(epoch=1))))
    second = connect(ends.dealer(router.address, b"same"))
    second.send(Heartbeat(epoch=2))
    collect(router, until((b"same", Heartbeat(epoch=2))))
    first.close()
    router.send(b"same", Unknown())
    assert collect(second, until(Unknown())) == [Unknown()]


def test_without_the_key_nothing_gets_in(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEBUS_BUS_KEY", "right")
    router = ends.router("tcp://127.0.0.1:*")
    strangers = []
    for key in ("wrong", ""):
        monkeypatch.setenv("PAGEBUS_BUS_KEY", key)
        strangers.append(ends.dealer(router.address, b"stranger"))
    monkeypatch.setenv("PAGEBUS_BUS_KEY", "right")
    friend = connect(ends.dealer(router.address, b"friend"))
    waiters = [Waiter(stranger) for stranger in strangers]
    for stranger, waiter in zip(strangers, waiters, strict=True):
        waiter.wait(0.3)
        assert Link.UP not in stranger.recv()
        assert not stranger.send(Unknown())
    friend.send(Unknown())
    assert collect(router, until((b"friend", Unknown()))) == [(b"friend", Unknown())]


def test_random_kills_and_reconnects_are_all_noticed(ends: Ends, tmp_path: Path) -> None:
    """Connections open and close in a random order; what the router says of them in the end is true."""
    router = ends.router(f"ipc://{tmp_path}/front")
    chance = random.Random(2)
    alive: dict[bytes, DealerLink] = {}
    state: dict[bytes, bool] = {}

    def follow(event: tuple[bytes, Message | Link]) -> None:
        state[event[0]] = event[1] is not Link.DOWN

    def hear() -> None:
        waiter.until(deadline)
        assert time.monotonic() < deadline
        for event in router.recv():
            follow(event)

    waiter, deadline = Waiter(router), time.monotonic() + PATIENCE
    for step in range(150):
        if alive and (len(alive) > 6 or chance.random() < 0.45):
            peer = chance.choice(sorted(alive))
            while peer not in state:  # who leaves without a word is not known by name
                hear()
            alive.pop(peer).close()
        else:
            peer = b"peer %d" % step
            alive[peer] = connect(ends.dealer(router.address, peer))
            alive[peer].send(Unknown())
        if chance.random() < 0.5:
            for event in router.recv():
                follow(event)
    while {peer for peer, up in state.items() if up} != set(alive):
        hear()


@given(st.data())
def test_connections_lag_of_monitor_and_messages(data: st.DataObject) -> None:
    """Descriptors are reused while the monitor lags: a peer with an open connection is never reported lost,
    and one that has closed, and whose closing and successor have been seen, always is."""
    table, lost = Connections(), set[bytes]()
    owner: dict[int, bytes] = {}
    lagging: list[tuple[str, int]] = []
    heard = set[bytes]()

    def monitor(count: int) -> None:
        for kind, fd in lagging[:count]:
            if kind == "open":
                table.accepted(fd)
            elif (gone := table.closed(fd)) is not None:
                lost.add(gone)
        del lagging[:count]

    for step in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["open", "close", "monitor"]))
        fd = data.draw(st.integers(0, 2))
        if action == "open" and fd not in owner:
            owner[fd] = b"%d" % step
            lagging.append(("open", fd))
            if (gone := table.heard(owner[fd], fd)) is not None:  # says Hello at once
                lost.add(gone)
            heard.add(owner[fd])
        elif action == "close" and fd in owner:
            del owner[fd]
            lagging.append(("close", fd))
        else:
            monitor(data.draw(st.integers(0, len(lagging))))
        assert not lost & set(owner.values())
    monitor(len(lagging))
    assert lost == heard - set(owner.values())


def test_addresses_of_both_kinds(tmp_path: Path) -> None:
    assert (front("tcp://h:5700"), back("tcp://h:5700")) == ("tcp://h:5700", "tcp://h:5701")
    assert (front("ipc:///d"), back("ipc:///d/")) == ("ipc:///d/front", "ipc:///d/back")
    assert tokenizer_endpoint(f"ipc://{tmp_path}", "ab" * 16) == f"ipc://{tmp_path}/tok-{'ab' * 8}"
    assert tokenizer_endpoint("tcp://127.0.0.1:5700", "x") == "tcp://127.0.0.1:*"


@pytest.mark.parametrize(
    "address",
    ["", "http://x:1", "tcp://x", "tcp://:5", "tcp://x:0", "tcp://x:65535", "ipc://relative", "ipc:///" + "x" * 99],
)
def test_a_bad_address_is_named(address: str) -> None:
    with pytest.raises(StartupError, match="bus address"):
        front(address)


def test_an_address_in_use_is_named(ends: Ends, address: str) -> None:
    taken = ends.router(address).address
    with pytest.raises(StartupError, match=f"{taken} is in use"):
        RouterLink(taken)


def test_what_a_killed_process_left_is_replaced(ends: Ends, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "front"))
    router = ends.router(f"ipc://{tmp_path}/front")
    connect(ends.dealer(router.address))


def test_sockets_of_killed_tokenizers_are_swept(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as alive:
        dead.bind(str(tmp_path / "tok-dead"))
        alive.bind(str(tmp_path / "tok-alive"))
        alive.listen()
        dead.close()
        for name in ("tok-dead", "tok-alive"):
            os.utime(tmp_path / name, (0, 0))
        tokenizer_endpoint(f"ipc://{tmp_path}", "x")
        assert [path.name for path in tmp_path.iterdir()] == ["tok-alive"]


def test_the_ipc_folder_is_private(ends: Ends, tmp_path: Path) -> None:
    ends.router(f"ipc://{tmp_path}/made/front")
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    with pytest.raises(StartupError, match=r"mode 755"):
        RouterLink(f"ipc://{shared}/front")


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(StartupError, match=r"nowhere\.invalid"):
        RouterLink("tcp://nowhere.invalid:5700")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_in_an_event_loop(ends: Ends, address: str, loop: str) -> None:
    """Echoes many bursts; a lost wake-up would hang it."""
    router = ends.router(address)
    rounds, burst = 30, 50

    async def client() -> int:
        got: list[Message | Link] = []
        changed = asyncio.Event()

        def handle(events: list[Message | Link]) -> None:
            got.extend(events)
            changed.set()

        async def expect(count: int) -> None:
            while len(got) < count:
                changed.clear()
                await asyncio.wait_for(changed.wait(), PATIENCE)

        dealer = AsyncDealer(router.address, b"me", handle)
        await expect(1)
        assert got.pop() is Link.UP
        assert dealer.connected
        for number in range(rounds):
            for _ in range(burst):
                assert dealer.send(Heartbeat(epoch=number))
            await asyncio.get_running_loop().run_in_executor(None, echo)
            await expect((number + 1) * burst)
        dealer.close()
        dealer.close()
        return len(got)

    def echo() -> None:
        for peer, message in collect(router, lambda got: len(got) >= burst):
            router.send(peer, message)

    with asyncio.Runner(loop_factory=_loop_factory(loop)) as runner:
        assert runner.run(client()) == rounds * burst


def _loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if name == "asyncio":
        return asyncio.new_event_loop
    uvloop = pytest.importorskip("uvloop")
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def test_closing_leaves_no_sockets_behind(tmp_path: Path) -> None:
    with zmq.Context() as context:  # leaving it would hang on an open socket
        RouterLink(f"ipc://{tmp_path}/front", context).close()
        dealer = DealerLink(f"ipc://{tmp_path}/front", b"x", context)
        dealer.close()
        dealer.close()
    assert context.closed

"""A scheduler on a real bus: the peers that a test drives, null workers as real processes, and all kinds of ends."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.scheduler.server import Server
from services.worker.null import null_token
from shared.addresses import front
from shared.bus import Link
from shared.config import EngineConfig
from shared.errors import EXIT_CONFIG
from shared.messages import (
    PROTOCOL,
    Abort,
    Assign,
    Delta,
    Deltas,
    Directory,
    Failed,
    Goodbye,
    Heartbeat,
    Hello,
    Peer,
    Plan,
    Progress,
    Ready,
    Rejected,
    Request,
    Reset,
    Result,
    Stats,
    Submit,
    Unknown,
    Welcome,
    pack_ids,
)
from shared.sampling import SamplingParams
from tests.bus_peers import MODEL, FakePeer, running
from tests.model_factory import smollm2

CONFIG = EngineConfig(model="none", num_gpu_blocks_override=1000, max_waiting=50)


class Running:
    """A scheduler in a thread, and peers to meet it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.peers: list[FakePeer] = []
        self._server: Server | None = None

    def start(self, config: EngineConfig = CONFIG) -> Server:
        self._server = Server(self.address, config, MODEL)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        return self._server

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._thread.join(20)
            assert not self._thread.is_alive()
            self._server = None

    def peer(self, role: str, *, own_address: str = "", loaded: str = "", beating: bool = True) -> FakePeer:
        """A member of a role; it has been welcomed."""
        peer = FakePeer(self.address, role, own_address=own_address, loaded=loaded, beating=beating)
        self.peers.append(peer)
        peer.expect(Welcome)
        return peer

    def worker(self, blocks: int = 1000) -> FakePeer:
        """A worker that is ready to be sent plans."""
        worker = self.peer("worker")
        worker.send(ready(worker.expect(Assign).epoch, blocks))
        worker.expect(Reset)
        return worker


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Running]:
    made = Running(f"ipc://{tmp_path}")
    yield made
    for peer in made.peers:
        peer.close()
    made.stop()


def ready(epoch: int, blocks: int = 1000) -> Ready:
    return Ready(epoch=epoch, num_blocks=blocks, block_bytes=1, backend="fake", fingerprint="f")


def request(id: int, first: int = 5, tokens: int = 4, attempt: int = 0, output: list[int] | None = None) -> Request:
    return Request(
        id=id,
        attempt=attempt,
        prompt=pack_ids([first, 6, 7]),
        params=SamplingParams(max_tokens=tokens, seed=1),
        output=pack_ids(output or []),
    )


def expected(first: int, tokens: int) -> list[int]:
    """What a null worker says to `request`."""
    out = []
    for position in range(3, 3 + tokens):
        token = null_token(first, position, MODEL.vocab_size)
        out.append(token + (token in MODEL.eos_token_ids))
    return out


class Collector:
    """The api's side of generations: accepts deltas as a journal would."""

    def __init__(self, api: FakePeer) -> None:
        self.api = api
        self.output: dict[int, list[int]] = {}
        self.finish: dict[int, str] = {}

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            for delta in self.api.expect(Deltas).items:
                self.accept(delta)

    def accept(self, delta: Delta) -> None:
        output = self.output.setdefault(delta.id, [])
        assert delta.index == len(output), "tokens were lost or repeated"
        output.extend(delta.ids)
        if delta.finish:
            assert delta.id not in self.finish
            self.finish[delta.id] = delta.finish


def answer(worker: FakePeer, plan: Plan, token: int = 9) -> None:
    worker.send(Result(plan.epoch, plan.step, [token] * sum(plan.samples)))


# Membership.


def test_peers_are_welcomed_with_the_engine_and_the_model(scheduler: Running) -> None:
    server = scheduler.start()
    api = FakePeer(scheduler.address, "api")
    scheduler.peers.append(api)
    welcome = api.expect(Welcome)
    assert (welcome.epoch, welcome.engine, welcome.model) == (server.epoch, CONFIG, MODEL)
    assert api.expect(Directory).tokenizers == []
    stats = api.expect(Stats)
    assert (stats.ready, stats.reason, stats.workers) == (False, "waiting for a worker", 0)


def test_the_directory_follows_the_tokenizers(scheduler: Running) -> None:
    scheduler.start()
    api = scheduler.peer("api")
    loading = scheduler.peer("tokenizer")
    tokenizer = scheduler.peer("tokenizer", own_address="ipc:///d/tok")
    listed = Peer(tokenizer.identity.decode(), "ipc:///d/tok")
    api.expect(Directory, lambda message: message.tokenizers == [listed])
    second = scheduler.peer("api")
    assert second.expect(Directory).tokenizers == [listed]
    loading.hello.address = "ipc:///d/late"
    loading.send(loading.hello)
    late = Peer(loading.identity.decode(), "ipc:///d/late")
    api.expect(Directory, lambda message: message.tokenizers == [listed, late])
    tokenizer.close()
    api.expect(Directory, lambda message: message.tokenizers == [late])
    loading.send(Goodbye())
    api.expect(Directory, lambda message: message.tokenizers == [])


def test_readiness_names_what_is_missing(scheduler: Running) -> None:
    scheduler.start()
    api = scheduler.peer("api")
    worker = scheduler.peer("worker")
    worker.send(Progress("loading layer 1/2"))
    api.expect(Stats, lambda stats: stats.reason == "loading layer 1/2" and stats.workers == 1)
    worker.send(ready(worker.expect(Assign).epoch))
    api.expect(Stats, lambda stats: stats.reason == "waiting for a tokenizer")
    scheduler.peer("tokenizer", own_address="ipc:///d/tok")
    api.expect(Stats, lambda stats: stats.ready and not stats.reason and stats.tokenizers == 1)
    worker.close()
    api.expect(Stats, lambda stats: not stats.ready and stats.reason == "waiting for a worker")


def test_the_silent_are_forgotten_and_told_so(scheduler: Running) -> None:
    scheduler.start()
    watcher, worker = scheduler.peer("api"), scheduler.peer("worker", beating=False)
    watcher.expect(Stats, lambda stats: stats.workers == 1)
    watcher.pending.clear()
    watcher.expect(Stats, lambda stats: stats.workers == 0)  # 3 s of silence
    worker.send(Heartbeat(epoch=1))
    worker.expect(Unknown)
    worker.expect(Welcome)
    watcher.expect(Stats, lambda stats: stats.workers == 1)


def test_hellos_that_do_not_belong_are_refused(scheduler: Running, caplog: pytest.LogCaptureFixture) -> None:
    scheduler.start()
    for role, hello in (
        ("api", Hello(role="worker", name="lost:1")),
        ("worker", Hello(role="api", name="lost:2")),
        ("api", Hello(role="api", name="old:1", protocol=PROTOCOL + 1)),
    ):
        stranger = FakePeer(scheduler.address, role)
        scheduler.peers.append(stranger)
        stranger.hello = hello
        stranger.wait_for(lambda item: item is Link.UP)
        stranger.send(Heartbeat(epoch=0))
        stranger.expect(Unknown)
        assert not any(isinstance(item, Welcome) for item in stranger.pending)
    assert sum("refusing" in record.getMessage() for record in caplog.records) >= 3


def test_garbage_on_both_sockets_disturbs_nobody(scheduler: Running) -> None:
    scheduler.start()
    scheduler.worker()
    api = scheduler.peer("api")
    chance = random.Random(3)
    for role in ("api", "worker"):
        bad = scheduler.peer(role)
        for _ in range(50):
            bad.dealer.socket.send(chance.randbytes(chance.randrange(80)))
        bad.dealer.socket.send_multipart([b"", b"x"])
        bad.send(Welcome(epoch=1, engine=CONFIG, model=MODEL))  # a message of the wrong direction
        bad.close()
    api.send(Abort(ids=[1, 2, 3]))
    api.expect(Stats, lambda stats: stats.workers == 1)


# Requests.


def test_requests_are_served_by_a_null_worker(scheduler: Running) -> None:
    scheduler.start()
    with running("worker", "--scheduler", scheduler.address, "--null"):
        api = scheduler.peer("api")
        collector = Collector(api)
        api.send(Submit([request(id, first=id, tokens=8) for id in range(40)]))  # parked until the worker is there
        collector.until(lambda: len(collector.finish) == 40)
        assert all(collector.output[id] == expected(id, 8) for id in range(40))
        assert set(collector.finish.values()) == {"length"}
        stats = api.expect(Stats, lambda stats: bool(stats.groups) and stats.groups[0].generation_tokens == 320)
        assert stats.groups[0].running == stats.groups[0].waiting == stats.parked == 0
        assert stats.schedule_seconds > 0


def test_a_burst_goes_into_one_step_and_two_plans_are_in_flight(scheduler: Running) -> None:
    scheduler.start()
    worker, api = scheduler.worker(), scheduler.peer("api")
    api.send(Submit([request(id) for id in range(3)]))
    first, second = worker.expect(Plan), worker.expect(Plan)
    assert (len(first.slots), len(second.slots)) == (3, 3)
    api.send(Submit([request(9)]))
    answer(worker, first)
    third = worker.expect(Plan)
    assert len(third.slots) == 4
    assert not any(isinstance(item, Plan) for item in worker.pending)
    deltas = api.expect(Deltas)  # one message for the step
    assert [(delta.id, delta.index, delta.ids) for delta in deltas.items] == [(id, 0, [9]) for id in range(3)]


def test_each_peer_gets_one_message_a_step(scheduler: Running) -> None:
    scheduler.start()
    apis = [scheduler.peer("api"), scheduler.peer("api")]
    for api in apis:
        api.send(Submit([request(id, tokens=40) for id in range(8)]))
    apis[0].expect(Stats, lambda stats: stats.parked == 16)
    worker = scheduler.worker()
    for _ in range(40):
        plan = worker.expect(Plan)
        assert len(plan.slots) == 16
        answer(worker, plan)
    for api in apis:
        sizes: list[int] = []
        while sum(sizes) < 8 * 40:
            sizes.append(sum(len(delta.ids) for delta in api.expect(Deltas).items))
        assert len(sizes) <= 40  # fewer where two results were found waiting
    assert not any(isinstance(item, Plan | Deltas) for peer in (worker, *apis) for item in peer.pending)


def test_the_second_plan_waits_for_newcomers(scheduler: Running) -> None:
    """Once a group's steps are known to be long, a request that comes early in a step goes with the next one."""
    scheduler.start()
    worker, api = scheduler.worker(), scheduler.peer("api")
    api.send(Submit([request(1, tokens=1)]))
    plan = worker.expect(Plan)
    began = time.monotonic()
    while time.monotonic() < began + 1:  # heartbeats go on, so that the step takes a second or two
        api.expect(Stats)
    answer(worker, plan)
    api.expect(Deltas)
    api.send(Submit([request(2)]))
    worker.expect(Plan)
    api.send(Submit([request(3)]))
    assert len(worker.expect(Plan).slots) == 2


def test_refusals(scheduler: Running) -> None:
    scheduler.start()
    api = scheduler.peer("api")
    bad = [
        Request(id=1, attempt=0, prompt=b"", params=SamplingParams(seed=1)),
        Request(id=2, attempt=0, prompt=b"123", params=SamplingParams(seed=1)),
        Request(id=3, attempt=0, prompt=pack_ids([MODEL.vocab_size]), params=SamplingParams(seed=1)),
        Request(id=4, attempt=0, prompt=pack_ids([-1]), params=SamplingParams(seed=1)),
        Request(id=5, attempt=0, prompt=pack_ids([1]), params=SamplingParams(seed=1), output=pack_ids([1000])),
    ]
    api.send(Submit(bad))
    for item in bad:
        rejected = api.expect(Rejected)
        assert (rejected.id, rejected.kind) == (item.id, "invalid")
    scheduler.worker(blocks=4)
    api.send(Submit([Request(id=6, attempt=1, prompt=pack_ids([1] * 64), params=SamplingParams(seed=1))]))
    rejected = api.expect(Rejected)
    assert (rejected.id, rejected.attempt, rejected.kind) == (6, 1, "invalid")
    assert "64 tokens" in rejected.message


def test_beyond_max_waiting_new_requests_are_refused_but_not_resubmitted_ones(scheduler: Running) -> None:
    scheduler.start()
    api = scheduler.peer("api")
    api.send(Submit([request(id) for id in range(51)] + [request(60, attempt=1)]))
    rejected = api.expect(Rejected)
    assert (rejected.id, rejected.kind) == (50, "overloaded")
    api.expect(Stats, lambda stats: stats.parked == 51)


def test_an_api_that_leaves_takes_its_requests_along(scheduler: Running) -> None:
    scheduler.start()
    worker, watcher = scheduler.worker(), scheduler.peer("api")
    for leave in (lambda api: api.send(Goodbye()), lambda api: api.close()):
        api = scheduler.peer("api")
        api.send(Submit([request(1, tokens=100)]))
        first, second = worker.expect(Plan), worker.expect(Plan)
        watcher.expect(Stats, lambda stats: stats.groups[0].running == 1)
        leave(api)
        watcher.expect(Stats, lambda stats: stats.groups[0].running == 0 and stats.groups[0].kv_usage == 0)
        answer(worker, first)
        answer(worker, second)


def test_a_hello_again_voids_what_was_submitted_before(scheduler: Running) -> None:
    scheduler.start()
    worker, api = scheduler.worker(), scheduler.peer("api")
    api.send(Submit([request(1, tokens=100)]))
    plans = [worker.expect(Plan), worker.expect(Plan)]
    api.send(api.hello)
    api.expect(Welcome)
    api.expect(Stats, lambda stats: stats.groups[0].running == 0)
    for plan in plans:
        answer(worker, plan)
    api.send(Submit([request(1, attempt=1, output=[9], tokens=2)]))
    answer(worker, worker.expect(Plan, lambda plan: bool(plan.admit)))
    assert [(delta.attempt, delta.index, delta.finish) for delta in api.expect(Deltas).items] == [(1, 1, "length")]


# Deaths.


def test_results_of_another_time_are_ignored(scheduler: Running) -> None:
    scheduler.start()
    worker, api = scheduler.worker(), scheduler.peer("api")
    api.send(Submit([request(1)]))
    plan = worker.expect(Plan)
    worker.send(Result(plan.epoch - 1, plan.step, [1]))
    worker.send(Result(plan.epoch, plan.step + 5, [2]))
    worker.send(Result(plan.epoch, plan.step, [3, 3]))
    answer(worker, plan, 4)
    assert [delta.ids for delta in api.expect(Deltas).items] == [[4]]


def test_a_killed_worker_costs_no_token(scheduler: Running) -> None:
    """Two workers; one is killed while all requests run."""
    scheduler.start()
    flags = ("worker", "--scheduler", scheduler.address, "--null")
    with running(*flags) as first, running(*flags):
        api = scheduler.peer("api")
        api.expect(Stats, lambda stats: sum(group.ready for group in stats.groups) == 2)
        collector = Collector(api)
        api.send(Submit([request(id, first=id, tokens=400) for id in range(40)]))
        collector.until(lambda: len(collector.output) == 40)
        first.kill()
        collector.until(lambda: len(collector.finish) == 40)
        assert all(collector.output[id] == expected(id, 400) for id in range(40))
        assert set(collector.finish.values()) == {"length"}


def test_a_worker_that_hangs_is_given_up(scheduler: Running) -> None:
    scheduler.start(EngineConfig(model="none", step_deadline=0.5))
    hanging, api = scheduler.worker(), scheduler.peer("api")
    api.send(Submit([request(1)]))
    plan = hanging.expect(Plan)
    hanging.expect(Goodbye)
    healthy = scheduler.worker()
    again = healthy.expect(Plan)
    assert again.epoch > plan.epoch
    assert [admit.tokens for admit in again.admit] == [pack_ids([5, 6, 7])]
    hanging.send(Result(plan.epoch, plan.step, [1]))
    answer(healthy, again, 8)
    assert [delta.ids for delta in api.expect(Deltas).items] == [[8]]


def test_loading_takes_as_long_as_it_takes(scheduler: Running) -> None:
    scheduler.start(EngineConfig(model="none", step_deadline=0.2))
    worker, api = scheduler.peer("worker"), scheduler.peer("api")
    api.send(Submit([request(1)]))
    epoch = worker.expect(Assign).epoch
    for _ in range(2):
        api.expect(Stats, lambda stats: stats.workers == 1 and stats.parked == 1)
    worker.send(ready(epoch))
    worker.expect(Plan)


def test_a_request_that_keeps_killing_workers_ends_with_an_error(scheduler: Running) -> None:
    scheduler.start()
    api = scheduler.peer("api")
    api.send(Submit([request(1)]))
    for _ in range(3):
        worker = scheduler.worker()
        worker.expect(Plan)
        worker.close()
    (delta,) = api.expect(Deltas).items
    assert delta.finish == "error"
    assert "3 times" in delta.message


def test_a_failed_worker_is_a_reason(scheduler: Running) -> None:
    scheduler.start()
    api, worker = scheduler.peer("api"), scheduler.peer("worker")
    worker.expect(Assign)
    worker.send(Failed("a tensor is missing"))
    api.expect(Stats, lambda stats: stats.reason == "a worker failed: a tensor is missing" and stats.workers == 0)
    worker.close()
    scheduler.worker()
    api.expect(Stats, lambda stats: stats.reason == "waiting for a tokenizer")


def test_a_worker_without_blocks_is_not_used(scheduler: Running) -> None:
    scheduler.start()
    worker, api = scheduler.peer("worker"), scheduler.peer("api")
    worker.send(ready(worker.expect(Assign).epoch, blocks=0))
    worker.send(Progress("still here"))
    api.expect(Stats, lambda stats: stats.progress == "still here" and not any(g.ready for g in stats.groups))


def test_an_identity_used_twice_has_the_last_word(scheduler: Running) -> None:
    scheduler.start()
    watcher, first = scheduler.peer("api"), scheduler.worker()
    second = FakePeer(scheduler.address, "worker", identity=first.identity)
    scheduler.peers.append(second)
    second.expect(Welcome)
    first.close()
    second.send(ready(second.expect(Assign).epoch))
    second.expect(Reset)
    watcher.pending.clear()
    watcher.expect(Stats, lambda stats: stats.workers == 1 and stats.groups[0].ready)


def test_the_scheduler_restarts_and_goes_on(scheduler: Running) -> None:
    """The worker keeps its weights; the api submits its journal; the text goes on where it was."""
    scheduler.start()
    with running("worker", "--scheduler", scheduler.address, "--null") as worker:
        api = scheduler.peer("api")
        collector = Collector(api)
        api.send(Submit([request(id, first=id, tokens=400) for id in range(10)]))
        collector.until(lambda: len(collector.output) == 10)
        scheduler.stop()
        api.wait_for(lambda item: item is Link.DOWN)
        for item in api.pending:
            if isinstance(item, Deltas):
                for delta in item.items:
                    collector.accept(delta)
        api.pending.clear()
        server = scheduler.start()
        assert api.expect(Welcome).epoch == server.epoch
        unfinished = [id for id in range(10) if id not in collector.finish]
        api.send(
            Submit([request(id, first=id, tokens=400, attempt=1, output=collector.output[id]) for id in unfinished])
        )
        collector.until(lambda: len(collector.finish) == 10)
        assert all(collector.output[id] == expected(id, 400) for id in range(10))
    assert sum("loading nothing" in line for line in worker.lines) == 1


# The process.


def test_the_process_reads_the_model_serves_and_ends(tmp_path: Path) -> None:
    with running("scheduler", "--bind", f"ipc://{tmp_path}", "--model", str(smollm2())) as process:
        api = FakePeer(f"ipc://{tmp_path}", "api")
        welcome = api.expect(Welcome)
        assert (welcome.model.architecture, welcome.engine.model) == ("LlamaForCausalLM", str(smollm2()))
        assert process.terminate() == 0
        api.close()
    assert any("serving" in line for line in process.lines)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "no bus address"),
        (("--bind", "tcp://127.0.0.1:1x"), "tcp://127.0.0.1:1x"),
        (("--bind", "ipc:///x", "--model", "/nowhere"), "/nowhere"),
        (("--bind", "ipc:///x", "--block-size", "0"), "--block-size"),
    ],
)
def test_a_mistake_is_one_line(flags: tuple[str, ...], said: str) -> None:
    with running("scheduler", *flags) as process:
        assert process.wait() == EXIT_CONFIG
    assert len(process.lines) == 1
    assert said in process.lines[0]


def test_an_address_in_use_is_one_line(scheduler: Running) -> None:
    scheduler.start()
    with running("scheduler", "--bind", scheduler.address) as process:
        assert process.wait() == EXIT_CONFIG
    assert process.lines == [
        f"error: {front(scheduler.address)} is in use: stop what listens there or choose another address"
    ]

"""A worker process against a scheduler's end of the bus that the test drives."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from services.worker.compute import Compute, Crash, Place, Say, fingerprint
from services.worker.null import NullEngine, null_token
from services.worker.server import Worker
from shared.bus import Link
from shared.config import EngineConfig
from shared.errors import EXIT_CONFIG, StartupError
from shared.messages import (
    Admit,
    Assign,
    Failed,
    Goodbye,
    Heartbeat,
    Hello,
    Plan,
    Progress,
    Ready,
    Reset,
    Result,
    Unknown,
    pack_ids,
)
from shared.model_info import ModelInfo
from shared.sampling import SamplingParams
from shared.wake import Wake
from tests.bus_peers import MODEL, FakeScheduler, Process, running

ENGINE = EngineConfig(model="none", num_gpu_blocks_override=100)


def plan(epoch: int, step: int, *, admit: bool = False, start: int = 0, count: int = 1, release: bool = False) -> Plan:
    """One row of slot 0, whose prompt is [5, 6, 7]."""
    admits = [Admit(slot=0, tokens=pack_ids([5, 6, 7]), num_prompt=3, params=SamplingParams(seed=1))] if admit else []
    rows = not release or admit
    return Plan(
        epoch=epoch,
        step=step,
        release=[0] if release else [],
        copies=[],
        admit=admits,
        slots=[0] * rows,
        starts=[start] * rows,
        counts=[count] * rows,
        samples=[1] * rows,
        blocks=[[0]] * rows,
    )


def token(position: int) -> int:
    return null_token(5, position, MODEL.vocab_size)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}"


@pytest.fixture
def scheduler(address: str) -> Iterator[FakeScheduler]:
    made = FakeScheduler(address)
    yield made
    made.close()


@pytest.fixture
def worker(address: str) -> Iterator[Process]:
    with running("worker", "--scheduler", address, "--null") as process:
        yield process


def ready(scheduler: FakeScheduler, epoch: int = 10) -> bytes:
    peer, _ = scheduler.welcome(ENGINE)
    scheduler.assign(peer, epoch)
    _, message = scheduler.expect(Ready)
    assert message.epoch == epoch
    return peer


def test_workers_of_another_quantization_are_not_interchangeable() -> None:
    other = msgspec.structs.replace(ENGINE, quantization="int4")
    assert fingerprint(other, MODEL, "null") != fingerprint(ENGINE, MODEL, "null")


def test_from_hello_to_results(scheduler: FakeScheduler, worker: Process) -> None:
    peer, hello = scheduler.welcome(ENGINE)
    assert (hello.role, hello.loaded, hello.instance.encode()) == ("worker", "", peer)
    assert hello.name.endswith(f":{worker.popen.pid}")
    scheduler.assign(peer, 10)
    scheduler.expect(Progress)
    _, message = scheduler.expect(Ready)
    assert (message.epoch, message.num_blocks, message.backend) == (10, 100, "null")
    assert message.fingerprint == fingerprint(ENGINE, MODEL, "null")
    scheduler.send(peer, Reset(epoch=10))
    scheduler.send(peer, plan(10, 1, admit=True, count=3))
    scheduler.send(peer, plan(10, 2, start=3))
    first, second = scheduler.expect(Result)[1], scheduler.expect(Result)[1]
    assert (first.tokens, second.tokens) == ([token(3)], [token(4)])
    assert first.seconds > 0
    scheduler.expect(Heartbeat)


def test_plans_of_another_epoch_are_dropped(scheduler: FakeScheduler, worker: Process) -> None:
    peer = ready(scheduler)
    scheduler.send(peer, plan(10, 1, admit=True, count=3))
    scheduler.expect(Result)
    scheduler.send(peer, plan(9, 2, start=3))
    scheduler.send(peer, plan(11, 2, start=3))
    scheduler.send(peer, Reset(epoch=11))
    scheduler.send(peer, plan(10, 2, start=3))
    scheduler.send(peer, plan(11, 1, admit=True, count=3))  # slot 0 is free again
    assert scheduler.expect(Result)[1].epoch == 11
    assert not any(isinstance(message, Result) for _, message in scheduler.pending)


def test_the_scheduler_dies_and_the_weights_stay(scheduler: FakeScheduler, worker: Process, address: str) -> None:
    peer = ready(scheduler)
    scheduler.send(peer, plan(10, 1, admit=True, count=3))
    scheduler.expect(Result)
    scheduler.close()
    successor = FakeScheduler(address, epoch=2)
    again, hello = successor.welcome(ENGINE)
    assert again == peer
    assert hello.loaded == fingerprint(ENGINE, MODEL, "null")
    successor.assign(peer, 20)
    successor.expect(Ready)
    assert not any(isinstance(message, Progress) for _, message in successor.pending)  # it did not load again
    successor.send(peer, plan(20, 1, admit=True, count=3))  # and its slots are clear
    assert successor.expect(Result)[1].tokens == [token(3)]
    successor.close()


def test_another_model_is_loaded_anew(scheduler: FakeScheduler, worker: Process) -> None:
    peer = ready(scheduler)
    scheduler.send(peer, Unknown())
    assert scheduler.welcome(EngineConfig(model="other", num_gpu_blocks_override=7))[0] == peer
    scheduler.assign(peer, 11)
    assert scheduler.expect(Ready)[1].num_blocks == 7


def test_unknown_is_answered_with_hello(scheduler: FakeScheduler, worker: Process) -> None:
    peer = ready(scheduler)
    scheduler.send(peer, Unknown())
    assert scheduler.expect(Hello)[1].loaded == fingerprint(ENGINE, MODEL, "null")


def test_sigterm_says_goodbye(scheduler: FakeScheduler, worker: Process) -> None:
    peer = ready(scheduler)
    worker.popen.send_signal(signal.SIGTERM)
    scheduler.expect(Goodbye, peer)
    assert worker.wait() == 0


def test_a_worker_given_up_ends_to_be_restarted(scheduler: FakeScheduler, worker: Process) -> None:
    scheduler.send(ready(scheduler), Goodbye())
    assert worker.wait() == 1


def test_a_failed_step_ends_the_process_with_its_traceback(scheduler: FakeScheduler, worker: Process) -> None:
    peer = ready(scheduler)
    scheduler.send(peer, plan(10, 1, start=3))  # of a slot that is free
    scheduler.wait_for(lambda item: item == (peer, Link.DOWN))
    assert worker.wait() == 1
    assert any("KeyError" in line for line in worker.lines)


def test_a_model_that_cannot_be_loaded_is_one_line(scheduler: FakeScheduler, address: str, tmp_path: Path) -> None:
    model = ModelInfo(**{field: getattr(MODEL, field) for field in MODEL.__struct_fields__} | {"path": "/nowhere"})
    with running("worker", "--scheduler", address) as worker:
        peer, _ = scheduler.welcome(EngineConfig(model="/nowhere"), model)
        scheduler.assign(peer, 10)
        assert "/nowhere" in scheduler.expect(Failed)[1].reason
        assert worker.wait() == EXIT_CONFIG
    assert len([line for line in worker.lines if "error" in line]) == 1


@pytest.mark.parametrize(("flags", "said"), [((), "--scheduler"), (("--scheduler", "x"), "bus address 'x'")])
def test_a_wrong_address_is_one_line(flags: tuple[str, ...], said: str) -> None:
    with running("worker", "--null", *flags) as worker:
        assert worker.wait() == EXIT_CONFIG
    assert len(worker.lines) == 1
    assert said in worker.lines[0]


class Gate(NullEngine):
    """Loads, and runs steps, only when told to."""

    opened = threading.Event()

    def __init__(self, engine: EngineConfig, model: ModelInfo, say: Say) -> None:
        super().__init__(engine, model, say)
        assert Gate.opened.wait(20)

    def run(self, plan: Plan) -> Result:
        assert Gate.opened.wait(20)
        return super().run(plan)


@pytest.fixture
def gated(address: str) -> Iterator[None]:
    """A worker in a thread whose engine is a `Gate`, closed at first."""
    Gate.opened.clear()
    worker = Worker(address, Gate)
    thread = threading.Thread(target=worker.run)
    thread.start()
    yield
    Gate.opened.set()
    worker.stop()
    thread.join(20)
    assert not thread.is_alive()


def test_heartbeats_go_on_while_loading_and_during_a_long_step(scheduler: FakeScheduler, gated: None) -> None:
    peer, _ = scheduler.welcome(ENGINE)
    scheduler.assign(peer, 10)
    scheduler.expect(Progress)
    scheduler.expect(Heartbeat)
    Gate.opened.set()
    scheduler.expect(Ready)
    Gate.opened.clear()
    scheduler.send(peer, plan(10, 1, admit=True, count=3))
    scheduler.pending.clear()
    scheduler.expect(Heartbeat)
    Gate.opened.set()
    scheduler.expect(Result)


def test_results_of_a_voided_epoch_stay_behind(scheduler: FakeScheduler, gated: None) -> None:
    """Plans queued behind a long step are dropped when their epoch ends."""
    Gate.opened.set()
    peer = ready(scheduler)
    Gate.opened.clear()
    scheduler.send(peer, plan(10, 1, admit=True, count=3))
    scheduler.send(peer, plan(10, 2, start=3))
    scheduler.send(peer, Reset(epoch=11))
    scheduler.send(peer, plan(11, 1, admit=True, count=3))
    scheduler.send(peer, Unknown())
    scheduler.expect(Hello)  # all before it has been received
    Gate.opened.set()
    scheduler.expect(Hello)
    results = [message.epoch for _, message in scheduler.pending if isinstance(message, Result)]
    assert 10 not in results[1:]


def test_the_compute_thread_reports_what_ended_it() -> None:
    def refuse(engine: EngineConfig, model: ModelInfo, say: Say) -> NullEngine:
        raise StartupError("two\nlines")

    wake = Wake()
    compute = Compute(refuse, wake)
    compute.start()
    compute.put(Place(ENGINE, MODEL, Assign(group=0, epoch=1, rank=0, world_size=1)))
    compute.join(20)
    failed, crash = compute.take()
    assert failed == Failed("two lines")
    assert isinstance(crash, Crash)
    wake.close()


def test_fingerprints_differ_where_loading_does() -> None:
    base = fingerprint(ENGINE, MODEL, "null")
    assert fingerprint(EngineConfig(model="none", num_gpu_blocks_override=100, max_waiting=5), MODEL, "null") == base
    assert fingerprint(EngineConfig(model="none", num_gpu_blocks_override=101), MODEL, "null") != base
    other = ModelInfo(**{field: getattr(MODEL, field) for field in MODEL.__struct_fields__} | {"dtype": "bfloat16"})
    assert fingerprint(ENGINE, other, "null") != base
    assert fingerprint(ENGINE, MODEL, "cpu avx512_bf16") != base

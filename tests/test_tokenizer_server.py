"""The tokenizer process on a real bus: membership, calls, failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import zmq

from services.tokenizer.calls import LONG, Calls
from services.tokenizer.loading import load
from shared.addresses import front
from shared.bus import DealerLink, Link, RouterLink, Waiter, new_identity
from shared.byte_decoder import ByteDecoder
from shared.chat import ChatOptions
from shared.config import EngineConfig
from shared.errors import EXIT_CONFIG
from shared.messages import (
    CallFailed,
    Decode,
    Decoded,
    DecodeItem,
    EncodeChat,
    Encoded,
    EncodeText,
    GetVocabulary,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Unknown,
    Welcome,
    unpack_ids,
)
from shared.model_info import ModelInfo
from tests.model_factory import smollm2

SECONDS = 30.0
Found = TypeVar("Found")


def welcome(path: Path | str, model: str = "", epoch: int = 1, vocab_size: int = 49152) -> Welcome:
    info = ModelInfo(
        path=str(path),
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        max_model_len=2048,
        eos_token_ids=[2],
        dtype="float32",
    )
    return Welcome(epoch, EngineConfig(model=model), info)


class Scheduler:
    """The scheduler's end of the front link: answers every Hello, keeps what it hears."""

    def __init__(self, address: str, answer: Welcome) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.router = RouterLink(front(address), self.context)
        self.waiter = Waiter(self.router)
        self.answer = answer
        self.heard: list[tuple[bytes, Message | Link]] = []

    def step(self) -> None:
        self.waiter.wait(0.05)
        for peer, message in self.router.recv():
            self.heard.append((peer, message))
            if isinstance(message, Hello):
                assert message.role == "tokenizer"
                assert message.instance.encode() == peer
                self.router.send(peer, self.answer)
            elif isinstance(message, Heartbeat):
                self.router.send(peer, Heartbeat(epoch=self.answer.epoch))

    def until(self, find: Callable[[], Found | None]) -> Found:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            found = find()
            if found:
                return found
            self.step()
        raise AssertionError(f"waited in vain; heard {self.heard}")

    def address_of(self, process: Any = None) -> str:
        """Waits until a tokenizer says where it serves."""

        def announced() -> str | None:
            assert process is None or process.poll() is None, process.stderr.read()
            hellos = [m for _, m in self.heard if isinstance(m, Hello)]
            return hellos[-1].address if hellos else None

        return self.until(announced)

    def close(self) -> None:
        """Returns once the address is free again."""
        self.router.close()
        self.context.term()


class Client:
    """The api's end of a link to a tokenizer."""

    def __init__(self, address: str) -> None:
        self.link = DealerLink(address, new_identity())
        self.waiter = Waiter(self.link)
        self.came: list[Message | Link] = []
        self.wait(lambda m: m is Link.UP)

    def wait(self, wanted: Callable[[Any], bool]) -> Any:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            for message in self.came:
                if wanted(message):
                    self.came.remove(message)
                    return message
            self.waiter.wait(0.05)
            self.came += self.link.recv()
        raise AssertionError(f"no answer; came {self.came}")

    def call(self, message: Any) -> Any:
        assert self.link.send(message)
        return self.wait(lambda m: getattr(m, "call", None) == message.call)

    def close(self) -> None:
        self.link.close()


class Bus:
    """A scheduler's end, and tokenizer processes that belong to it."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}"
        self.processes: list[subprocess.Popen[str]] = []
        self.closing: list[Any] = []

    def scheduler(self, answer: Welcome) -> Scheduler:
        made = Scheduler(self.address, answer)
        self.closing.append(made)
        return made

    def client(self, address: str) -> Client:
        made = Client(address)
        self.closing.append(made)
        return made

    def start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.tokenizer", "--scheduler", self.address],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PAGEBUS_LOG_LEVEL": "WARNING"},
        )
        self.processes.append(process)
        return process

    def close(self) -> None:
        for each in self.closing:
            each.close()
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    folder = tmp_path / "bus"
    folder.mkdir(mode=0o700)
    made = Bus(folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bus, Scheduler, str]]:
    """One tokenizer, for the tests that leave it alive, and its address."""
    folder = tmp_path_factory.mktemp("served")
    folder.chmod(0o700)
    made = Bus(folder)
    scheduler, process = made.scheduler(welcome(smollm2())), made.start()
    yield made, scheduler, scheduler.address_of(process)
    made.close()


def ids_of(answer: Encoded) -> list[list[int]]:
    return [list(unpack_ids(packed)) for packed in answer.ids]


def test_calls_are_answered(served: tuple[Bus, Scheduler, str]) -> None:
    bus, scheduler, address = served
    client = bus.client(address)
    hellos = [m.address for _, m in scheduler.heard if isinstance(m, Hello)]
    assert hellos[0] == "", "it has no address before it can serve"

    texts = EncodeText(1, ["🌶", "}}", ""], want_strings=True)
    answer = client.call(texts)
    assert ids_of(answer) == [[10813, 230, 131], [17859], []]
    assert answer.strings[1] == ["}}"]

    messages = msgspec.json.encode([{"role": "user", "content": "hi"}])
    chat = client.call(EncodeChat(2, messages, msgspec.json.encode(ChatOptions())))
    (ids,) = ids_of(chat)
    assert (ids[0], ids[-1]) == (1, 198)
    foreign = ChatOptions(chat_template="{{ messages[0].content }}")
    assert ids_of(client.call(EncodeChat(3, messages, msgspec.json.encode(foreign)))) == [[6004]]

    items = [DecodeItem(b"", [10813, 230]), DecodeItem(b"", ids, True, True), DecodeItem(b"", [905], final=True)]
    first = client.call(Decode(4, items))
    assert [item.text for item in first.items][::2] == ["", " world"]
    rest = client.call(Decode(5, [DecodeItem(first.items[0].state, [131], final=True)]))
    assert rest.items[0].text == "🌶"

    told = client.call(GetVocabulary(9, scheduler.answer.model.path))
    here = ByteDecoder(told.pieces, told.special, strip=told.strip)
    for item, decoded in zip(items, first.items, strict=True):
        assert here.decode(item) == decoded
    assert isinstance(client.call(GetVocabulary(10, "another")), CallFailed)

    failed = client.call(Decode(6, [DecodeItem(b"", [49152])]))
    assert (type(failed), failed.param) == (CallFailed, "tokens")
    failed = client.call(EncodeChat(7, b"[]"))
    assert (type(failed), failed.param) == (CallFailed, "messages")
    assert isinstance(client.call(EncodeChat(8, messages, b'{"tools": 5}')), CallFailed)


def test_nonsense_is_dropped_and_hurts_nobody(served: tuple[Bus, Scheduler, str]) -> None:
    bus, _, address = served
    client = bus.client(address)
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.linger = 0
    raw.connect(address)
    try:
        for frames in ([b""], [b"\xff" * 100], [b"a", b"b"], [b"\x93\xa6Decode"], [b"{}"]):
            raw.send_multipart(frames)
        client.link.send(Goodbye())
        assert ids_of(client.call(EncodeText(1, ["}}"]))) == [[17859]]
    finally:
        raw.close()


def test_long_prompts_do_not_hold_up_streams(served: tuple[Bus, Scheduler, str]) -> None:
    bus, _, address = served
    client = bus.client(address)
    text = "Once upon a time there was a scheduler. " * 25_000
    client.link.send(EncodeText(1, [text]))
    for number in range(2, 200):
        client.link.send(EncodeText(number, ["Once upon a time"]))
    assert isinstance(client.call(Decode(1000, [DecodeItem(b"", [905])])), Decoded)
    order = [message.call for message in client.came if isinstance(message, Encoded)]
    assert 1 not in order, "a megabyte was encoded before the stream's token"
    assert len(ids_of(client.wait(lambda m: getattr(m, "call", 0) == 1))[0]) > 200_000
    for number in range(2, 200):
        client.wait(lambda m, number=number: getattr(m, "call", 0) == number)


def test_it_serves_while_the_scheduler_is_away_and_finds_the_next_one(bus: Bus) -> None:
    scheduler, process = bus.scheduler(welcome(smollm2())), bus.start()
    address = scheduler.address_of(process)
    client = bus.client(address)
    scheduler.close()
    assert ids_of(client.call(EncodeText(1, ["}}"]))) == [[17859]]
    another = bus.scheduler(welcome(smollm2(), epoch=2))
    assert another.address_of(process) == address
    assert ids_of(client.call(EncodeText(2, ["}}"]))) == [[17859]]


def test_it_says_hello_again_when_unknown_and_beats_while_known(served: tuple[Bus, Scheduler, str]) -> None:
    _, scheduler, address = served
    scheduler.until(lambda: [m for _, m in scheduler.heard if m == Heartbeat(epoch=1)])
    peer = scheduler.heard[0][0]
    scheduler.heard.clear()
    scheduler.router.send(peer, Unknown())
    assert scheduler.address_of() == address


def test_it_takes_leave(bus: Bus) -> None:
    scheduler, process = bus.scheduler(welcome(smollm2())), bus.start()
    scheduler.address_of(process)
    process.send_signal(signal.SIGTERM)
    scheduler.until(lambda: [m for _, m in scheduler.heard if isinstance(m, Goodbye)])
    assert process.wait(SECONDS) == 0
    assert process.stderr.read() == ""


def test_its_death_shows_and_another_takes_over(bus: Bus) -> None:
    scheduler, first = bus.scheduler(welcome(smollm2())), bus.start()
    address = scheduler.address_of(first)
    client = bus.client(address)
    first.kill()
    client.wait(lambda m: m is Link.DOWN)
    scheduler.until(lambda: [m for _, m in scheduler.heard if m is Link.DOWN])
    scheduler.heard.clear()
    second = bus.client(scheduler.address_of(bus.start()))
    assert second.link.address != address
    assert ids_of(second.call(EncodeText(1, ["}}"]))) == [[17859]]


def test_a_model_that_cannot_load_ends_it_with_one_line(bus: Bus, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    scheduler, process = bus.scheduler(welcome(empty)), bus.start()
    scheduler.until(lambda: process.poll() is not None)
    assert process.returncode == EXIT_CONFIG
    (line,) = process.stderr.read().splitlines()
    assert "holds no tokenizer" in line


def test_a_path_of_another_machine_is_resolved_again(bus: Bus) -> None:
    scheduler = bus.scheduler(welcome("/nowhere/model.gguf", model=str(smollm2())))
    client = bus.client(scheduler.address_of(bus.start()))
    assert ids_of(client.call(EncodeText(1, ["}}"]))) == [[17859]]


def test_another_model_is_loaded_when_the_scheduler_serves_another(bus: Bus) -> None:
    scheduler, process = bus.scheduler(welcome(smollm2())), bus.start()
    address = scheduler.address_of(process)
    client = bus.client(address)
    assert isinstance(client.call(Decode(1, [DecodeItem(b"", [50_000])])), CallFailed)
    peer = scheduler.heard[0][0]
    scheduler.heard.clear()
    scheduler.answer = welcome(smollm2(), vocab_size=50_001, epoch=2)
    scheduler.router.send(peer, scheduler.answer)
    assert scheduler.address_of(process) == address
    assert isinstance(client.call(Decode(2, [DecodeItem(b"", [50_000])])), Decoded)


def test_a_bad_address_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.tokenizer", "--scheduler", "nowhere"], capture_output=True, text=True
    )
    assert done.returncode == EXIT_CONFIG
    assert done.stderr.splitlines() == ["error: bus address 'nowhere': use tcp://host:port or ipc:///folder"]


def test_what_counts_as_long() -> None:
    calls = Calls(load(smollm2()))
    assert not calls.is_long(EncodeText(1, ["a" * LONG]))
    assert calls.is_long(EncodeText(1, ["a" * LONG, "b"]))
    assert calls.is_long(EncodeChat(1, b" " * (LONG + 1)))
    assert not calls.is_long(EncodeChat(1, b"[]", msgspec.json.encode(ChatOptions(chat_template_kwargs={"a": 1}))))
    assert calls.is_long(EncodeChat(1, b"[]", msgspec.json.encode(ChatOptions(chat_template="x"))))

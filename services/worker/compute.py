"""The thread that owns the model. The I/O thread keeps the heartbeats going beside it, however long a step takes."""

from __future__ import annotations

import gc
import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import msgspec

from shared.config import EngineConfig
from shared.errors import StartupError
from shared.messages import Assign, Failed, Message, Plan, Progress, Ready, Reset, Result
from shared.model_info import ModelInfo
from shared.wake import Wake

log = logging.getLogger(__name__)

Say = Callable[[str], None]

# What a worker can hear about without loading again.
_NOT_LOADED = (
    "served_model_name",
    "seed",
    "step_deadline",
    "enable_prefix_caching",
    "scheduling_policy",
    "max_waiting",
)


class Engine(Protocol):
    """A loaded model that runs plans."""

    num_blocks: int
    block_bytes: int
    backend: str
    arithmetic: str
    device: str

    def run(self, plan: Plan) -> Result:
        """Runs one step."""

    def reset(self) -> None:
        """Clears all slots."""


Load = Callable[[EngineConfig, ModelInfo, Say], Engine]


@dataclass(frozen=True)
class Place:
    """An Assign, and the model it is about."""

    engine: EngineConfig
    model: ModelInfo
    assign: Assign


@dataclass(frozen=True)
class Crash:
    """The compute thread has ended; the process must too."""

    error: BaseException


def fingerprint(engine: EngineConfig, model: ModelInfo, arithmetic: str) -> str:
    """Names all that a loaded engine's results depend on: workers of equal fingerprints are interchangeable.

    `arithmetic`: that of its executor, which the CPU has a say in.
    """
    facts = msgspec.to_builtins(engine) | {"info": msgspec.to_builtins(model), "arithmetic": arithmetic}
    for name in _NOT_LOADED:
        facts.pop(name, None)
    del facts["info"]["created"]
    return hashlib.blake2b(msgspec.json.encode(facts, order="deterministic"), digest_size=16).hexdigest()


class Compute(threading.Thread):
    """Loads the model on the first Place and runs plans in order.

    `epoch` is the group epoch in force, set by the I/O thread; plans of another are dropped, even those queued already.
    Finished work is taken with `take`, announced by `wake`.
    """

    def __init__(self, load: Load, wake: Wake) -> None:
        super().__init__(name="compute", daemon=True)
        self.epoch = 0
        self.loaded = ""  # fingerprint
        self._load = load
        self._wake = wake
        self._ended = time.perf_counter()  # the last step
        self._engine: Engine | None = None
        self._jobs: SimpleQueue[Place | Plan | Reset] = SimpleQueue()
        self._done: deque[Message | Crash] = deque()

    def put(self, job: Place | Plan | Reset) -> None:
        """Queues work."""
        self._jobs.put(job)

    def take(self) -> list[Message | Crash]:
        """What has been finished since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def run(self) -> None:
        """The thread's body; ends with Failed or Crash only."""
        try:
            while True:
                self._do(self._jobs.get())
        except StartupError as error:
            self._post(Failed(" ".join(str(error).split())))
            self._post(Crash(error))
        except BaseException as error:
            log.exception("the compute thread failed")
            self._post(Crash(error))

    def _do(self, job: Place | Plan | Reset) -> None:
        if isinstance(job, Plan):
            if job.epoch == self.epoch:
                assert self._engine is not None
                began = time.perf_counter()
                result = self._engine.run(job)
                result.idle = began - self._ended
                self._ended = time.perf_counter()
                result.seconds = self._ended - began
                self._post(result)
        elif isinstance(job, Reset):
            if self._engine is not None:
                self._engine.reset()
        else:
            self._take_place(job)

    def _take_place(self, place: Place) -> None:
        if self._engine is None or self.loaded != fingerprint(place.engine, place.model, self._engine.arithmetic):
            self._unload()
            began = time.monotonic()
            self._engine = self._load(place.engine, place.model, self._say)
            self.loaded = fingerprint(place.engine, place.model, self._engine.arithmetic)
            self._say(
                f"ready: {self._engine.num_blocks} blocks of {place.engine.block_size} tokens,"
                f" {self._engine.backend} backend, loaded in {time.monotonic() - began:.1f} s"
            )
        engine = self._engine
        engine.reset()
        self._post(
            Ready(
                epoch=place.assign.epoch,
                num_blocks=engine.num_blocks,
                block_bytes=engine.block_bytes,
                backend=engine.backend,
                fingerprint=self.loaded,
                device=engine.device,
            )
        )

    def _unload(self) -> None:
        if self._engine is not None:
            self._engine, self.loaded = None, ""
            gc.collect()  # before the next model is measured against the memory

    def _say(self, text: str) -> None:
        log.info("%s", text)
        self._post(Progress(text))

    def _post(self, item: Message | Crash) -> None:
        self._done.append(item)
        self._wake.set()

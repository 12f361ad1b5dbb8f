"""The scheduler on the bus: one thread, one loop, around the pure cores of groups, roster and deadlines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from services.scheduler.core import MAX_IN_FLIGHT
from services.scheduler.deadlines import Deadlines
from services.scheduler.groups import Group, Groups, Replies
from services.scheduler.roster import BACK_ROLES, FRONT_ROLES, Roster, refusal
from shared.addresses import back, front
from shared.bus import Link, RouterLink, Waiter
from shared.config import EngineConfig
from shared.messages import (
    HEARTBEAT_SECONDS,
    Abort,
    Assign,
    Delta,
    Deltas,
    Directory,
    Failed,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
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
    unpack_ids,
)
from shared.model_info import ModelInfo
from shared.wake import Wake

log = logging.getLogger(__name__)


class Server:
    """A scheduler for one model. All its state is soft: what a successor needs, peers tell it."""

    def __init__(self, address: str, config: EngineConfig, model: ModelInfo) -> None:
        """Binds both sockets at `address`. Raises StartupError when they are taken."""
        self.epoch = time.time_ns()
        self._config = config
        self._model = model
        self._front = RouterLink(front(address))
        self._back = RouterLink(back(address))
        self._wake = Wake()
        self._waiter = Waiter(self._front, self._back, fds=[self._wake.fd])
        self._roster = Roster()
        # Group epochs are unique across schedulers: a plan of the last one must never pass for one of this.
        self._groups = Groups(config, model.max_model_len, model.eos_token_ids, first_epoch=self.epoch)
        self._deadlines = Deadlines(config.step_deadline)
        self._deltas: dict[bytes, list[Delta]] = {}  # to send, by api process
        self._progress: dict[bytes, str] = {}  # of loading workers
        self._failure = ""  # why the last worker gave up, until one is ready
        self._news = False  # what the apis were told last is not all
        self._next_beat = 0.0
        self._plan_at = float("inf")  # when there may be another plan to send
        self._core_seconds = 0.0  # of CPU
        self._stopping = False

    def stop(self) -> None:
        """Makes `run` return soon; for signal handlers and other threads."""
        self._stopping = True
        self._wake.set()

    def run(self) -> None:
        """Serves until stopped."""
        log.info("serving %s at %s and %s", self._config.names[0], self._front.address, self._back.address)
        try:
            while not self._stopping:
                self._receive()
                self._schedule()
                self._send_deltas()
                self._look_after_peers()
        finally:
            self._front.close()
            self._back.close()

    # The step loop.

    def _receive(self) -> None:
        """Waits for messages, then drains both sockets, so that a burst goes into one step."""
        ready = self._waiter.until(min(self._plan_at, self._next_beat, self._deadlines.next()))
        if self._wake.fd in ready:
            self._wake.clear()
        if self._back in ready:
            for peer, item in self._back.recv():
                self._take(peer, item, self._back, self._from_worker)
        if self._front in ready:
            for peer, item in self._front.recv():
                self._take(peer, item, self._front, self._from_front)

    def _schedule(self) -> None:
        """A plan for each group that has work, room for one in flight, and use for it now."""
        self._plan_at = float("inf")
        for group in self._groups.groups:
            if group.scheduler is None:
                continue
            clock = self._deadlines.of(group.epoch)
            now = time.monotonic()
            if clock.in_flight == MAX_IN_FLIGHT:
                continue
            if (at := clock.next_plan_at()) > now:
                self._plan_at = min(self._plan_at, at)
                continue
            began = time.thread_time()
            plan = group.scheduler.schedule(now)
            self._core_seconds += time.thread_time() - began
            if plan is not None:
                clock.sent(now)
                self._tell_ranks(group, plan)
                if clock.in_flight < MAX_IN_FLIGHT:
                    self._plan_at = now  # perhaps another, once what is right behind has been received

    def _send_deltas(self) -> None:
        """One message for each api process. One that cannot be reached will submit anew whatever it still wants."""
        deltas, self._deltas = self._deltas, {}
        for peer, items in deltas.items():
            if peer in self._roster:
                self._tell(self._front, peer, Deltas(self.epoch, items))

    # Messages.

    def _take(
        self, peer: bytes, item: Message | Link, link: RouterLink, handle: Callable[[bytes, Message, float], None]
    ) -> None:
        now = time.monotonic()
        if isinstance(item, Hello):
            self._hello(peer, item, link, now)
        elif item is Link.DOWN:
            self._lose(peer, "disconnected")
        elif isinstance(item, Goodbye):
            self._lose(peer, "left")
        elif not self._roster.heard(peer, now):
            link.send(peer, Unknown())
        elif not isinstance(item, Heartbeat | Link):
            handle(peer, item, now)

    def _hello(self, peer: bytes, hello: Hello, link: RouterLink, now: float) -> None:
        """A peer starts over: what it was before is void, as messages to and from it may be lost."""
        problem = refusal(hello, BACK_ROLES if link is self._back else FRONT_ROLES)
        if problem:
            log.warning("refusing %s: it %s", hello.name, problem)
            return
        self._lose(peer, "starts over")
        self._roster.add(peer, hello, now)
        self._news = True
        log.info("%s joined%s", self._roster.name(peer), " with the model loaded" if hello.loaded else "")
        if not self._tell(link, peer, Welcome(self.epoch, self._config, self._model)):
            return
        if hello.role == "worker":
            self._assign(self._groups.join(peer))
        elif hello.role == "tokenizer":
            self._tell_directory(self._roster.of("api"))
        else:
            self._tell_directory([peer])
            self._tell(self._front, peer, self._stats(now))

    def _from_front(self, peer: bytes, message: Message, now: float) -> None:
        if isinstance(message, Submit):
            for request in message.requests:
                self._submit(peer, request, now)
        elif isinstance(message, Abort):
            began = time.thread_time()
            self._groups.abort(peer, message.ids)
            self._core_seconds += time.thread_time() - began

    def _submit(self, peer: bytes, request: Request, now: float) -> None:
        began = time.thread_time()
        problem = self._invalid(request)
        if problem:
            answer: Delta | Rejected | None = Rejected(request.id, request.attempt, "invalid", problem)
        else:
            answer = self._groups.submit(peer, request, now)
        self._core_seconds += time.thread_time() - began
        if answer is not None:
            self._reply([(peer, answer)])

    def _invalid(self, request: Request) -> str:
        """What would make a worker fail: not a matter of one api's care."""
        for packed in (request.prompt, request.output):
            if len(packed) % 4:
                return "The token ids are not packed as int32."
            ids = unpack_ids(packed)
            if ids and not (min(ids) >= 0 and max(ids) < self._model.vocab_size):
                return f"A token id is outside the vocabulary of {self._model.vocab_size}."
        return "" if request.prompt else "The prompt has no tokens."

    def _from_worker(self, worker: bytes, message: Message, now: float) -> None:
        match message:
            case Result():
                self._result(worker, message, now)
            case Ready():
                self._ready(worker, message)
            case Progress():
                self._progress[worker] = message.text
                self._news = True
            case Failed():
                log.error("%s failed: %s", self._roster.name(worker), message.reason)
                self._failure = message.reason
                self._lose(worker, "failed")

    def _result(self, worker: bytes, result: Result, now: float) -> None:
        group = self._groups.find(worker, result.epoch)
        if group is None or group.scheduler is None or worker != group.ranks[0]:
            return  # of a time gone by, or a rank whose answer is the same
        began = time.thread_time()
        try:
            deltas = group.scheduler.update(result.step, result.tokens, result.seconds, result.idle)
        except ValueError as error:
            log.warning("ignoring a result of %s: %s", self._roster.name(worker), error)
            return
        self._core_seconds += time.thread_time() - began
        self._deadlines.of(result.epoch).done(now)
        for peer, items in deltas.items():
            self._deltas.setdefault(peer, []).extend(items)

    def _ready(self, worker: bytes, ready: Ready) -> None:
        self._progress.pop(worker, None)
        if ready.num_blocks < 1:
            log.warning("%s has no KV blocks", self._roster.name(worker))
            return
        group, replies = self._groups.ready(worker, ready.epoch, ready.num_blocks)
        if group is not None:
            log.info("group %d is ready: %d blocks, %s", group.index, ready.num_blocks, ready.backend)
            self._failure, self._news = "", True
            self._tell_ranks(group, Reset(group.epoch))
        self._reply(replies)

    # Sending.

    def _tell(self, link: RouterLink, peer: bytes, message: Message) -> bool:
        """Sends to a member, and gives it up when that fails."""
        if link.send(peer, message):
            return True
        self._lose(peer, "cannot be reached")
        return False

    def _tell_ranks(self, group: Group, message: Message) -> None:
        for rank in tuple(group.ranks):
            if not self._tell(self._back, rank, message):
                return  # the group has ended with it

    def _tell_directory(self, apis: Iterable[bytes]) -> None:
        directory = Directory(self._roster.tokenizers())
        for api in apis:
            self._tell(self._front, api, directory)

    def _assign(self, groups: Iterable[Group]) -> None:
        for group in groups:
            epoch = group.epoch
            for rank, worker in enumerate(tuple(group.ranks)):
                if group.epoch == epoch:  # else a rank could not be reached, and the group has been formed anew
                    self._tell(self._back, worker, Assign(group.index, epoch, rank, self._groups.world_size))

    def _reply(self, replies: Replies) -> None:
        for peer, answer in replies:
            if isinstance(answer, Delta):
                self._deltas.setdefault(peer, []).append(answer)
            elif peer in self._roster:
                self._tell(self._front, peer, answer)

    # Peers.

    def _look_after_peers(self) -> None:
        """Heartbeats, statistics, and an end for members that are silent or owe a step for too long."""
        now = time.monotonic()
        for epoch in self._deadlines.missed(now):
            self._give_up(epoch)
        if now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_SECONDS
            for peer in self._roster.silent(now):
                self._lose(peer, "is silent")
            self._beat(now)
        elif self._news:
            self._tell_stats(now)

    def _beat(self, now: float) -> None:
        beat = Heartbeat(self.epoch)
        for role, link in (("worker", self._back), ("tokenizer", self._front), ("api", self._front)):
            for peer in self._roster.of(role):
                self._tell(link, peer, beat)
        self._tell_stats(now)

    def _tell_stats(self, now: float) -> None:
        self._news = False
        stats = self._stats(now)
        for api in self._roster.of("api"):
            self._tell(self._front, api, stats)

    def _give_up(self, epoch: int) -> None:
        """A group owes a step for too long. Its workers are told to go: one that hangs is of no use to any group."""
        self._deadlines.forget(epoch)
        for group in self._groups.groups:
            if group.epoch == epoch:
                for rank in tuple(group.ranks):
                    self._back.send(rank, Goodbye())
                    self._lose(rank, f"owes a step for {self._config.step_deadline:g} s")

    def _lose(self, peer: bytes, why: str) -> None:
        """A member is gone: its work goes to others, its requests end, its address is withdrawn."""
        name = self._roster.name(peer)
        hello = self._roster.remove(peer)
        if hello is None:
            return
        log.info("%s %s", name, why)
        self._news = True
        if hello.role == "worker":
            self._progress.pop(peer, None)
            group = self._groups.group_of(peer)
            if group is not None:
                self._deadlines.forget(group.epoch)
            formed, replies = self._groups.leave(peer)
            self._assign(formed)
            self._reply(replies)
        elif hello.role == "api":
            self._groups.drop_peer(peer)
            self._deltas.pop(peer, None)
        else:
            self._tell_directory(self._roster.of("api"))

    def _stats(self, now: float) -> Stats:
        groups = self._groups.stats(now)
        return Stats(
            epoch=self.epoch,
            ready=not self._reason(),
            reason=self._reason(),
            groups=groups,
            parked=len(self._groups.parked),
            tokenizers=len(self._roster.tokenizers()),
            workers=len(self._roster.of("worker")),
            schedule_seconds=self._core_seconds,
            progress=self._progress_text(),
        )

    def _reason(self) -> str:
        """Why requests cannot be served now; "" if they can."""
        if not self._groups.schedulers():
            if self._failure:
                return f"a worker failed: {self._failure}"
            return self._progress_text() or "waiting for a worker"
        return "" if self._roster.tokenizers() else "waiting for a tokenizer"

    def _progress_text(self) -> str:
        return "; ".join(self._progress.values())

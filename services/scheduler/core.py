"""The scheduler of one worker group: requests in, plans out, results in, deltas out. No I/O; time is an argument.

There is no prefill phase and no decode phase. Each step has one budget of tokens, and each running sequence's computed
tokens catch up with its tokens: a decode has one to go, a prompt or a recompute after preemption many.

Two plans may be in flight: plan N + 1 is made before N's result is back, on the assumption that each sampled row gave
one more token. A stop is therefore noticed a plan late, and the surplus token is dropped. Blocks and slots of an ended
sequence are reused at once although a plan in flight may still write to them: the workers run plans in order, so
whatever an older plan writes lies in the past of the plan that hands the block or slot to somebody else.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable

from services.scheduler.admission import Admission, shareable_leader
from services.scheduler.block_space import BlockSpaceManager
from services.scheduler.counters import Counters
from services.scheduler.limits import Limits
from services.scheduler.policy import POLICIES, share_budget, share_leftover
from services.scheduler.prefix_cache import Match
from services.scheduler.request import FINISH_REASONS, Key, Sequence, Status
from services.scheduler.step import NO_BLOCKS, NONSENSE, NOT_SAMPLED, Step
from services.scheduler.step_time import StepTime
from shared.config import EngineConfig
from shared.messages import Delta, GroupStats, Plan

Deltas = dict[bytes, list[Delta]]  # by api process

RUNNING = Status.RUNNING
MAX_IN_FLIGHT = 2  # plans
MAX_CRASHES = 3


class Scheduler:
    """Schedules one worker group over one pool of KV blocks."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        *,
        epoch: int = 0,
        counters: Counters | None = None,
    ) -> None:
        """`epoch` is the group's, and marks all plans; `num_blocks` is the least over the group's ranks."""
        self.config = config
        self.epoch = epoch
        self.counters = counters or Counters()
        self.space = BlockSpaceManager(num_blocks, config.block_size, config.enable_prefix_caching)
        self.block_size = config.block_size
        self.limits = Limits(max_model_len, num_blocks * config.block_size, eos_token_ids)
        self.chunked = config.enable_chunked_prefill
        # Whole prompts need a budget that takes the longest; decodes then come on top of it.
        self.budget = (
            config.max_num_batched_tokens if self.chunked else max(config.max_num_batched_tokens, max_model_len)
        )
        # Each running sequence has a token to compute in each step, so none starves.
        self.max_running = min(config.max_num_seqs, self.budget)
        self.requests: dict[Key, Sequence] = {}
        self.running: list[Sequence] = []  # by order of arrival; ended ones are dropped before the next plan
        self.admission = Admission(self.space, POLICIES[config.scheduling_policy], whole_prompts=not self.chunked)
        self._slots = list(range(self.max_running - 1, -1, -1))
        self._release: list[int] = []
        self._in_flight: deque[Step] = deque()
        self._held: list[Sequence] = []  # preempted, with results still to come
        self._stale = False  # `running` holds ended sequences
        self._step = 0
        self._done = 0  # the last step whose result is known
        self._had_work = False  # when that was known
        self._step_time = StepTime()
        self._max_step = config.max_step_ms / 1000  # seconds; 0: any

    # Requests come and go.

    def add(self, seq: Sequence) -> Delta | None:
        """Takes a new sequence, or one from another group. Returns its last delta if there is nothing left to generate.

        Raises RequestError when it can never be served here.
        """
        self.limits.apply(seq)
        seq.last_step = -1
        if seq.num_output:
            status = self.limits.end_of(seq)
            if status is not None:
                seq.status = status
                return self._delta(seq, [])
        self.requests[seq.key] = seq
        leader = self.requests.get(seq.fork_key) if seq.fork_key else None
        if leader is not None and leader is not seq and not leader.shareable and leader.status != Status.PREEMPTED:
            leader.forks.append(seq)
        else:
            self.admission.enqueue(seq)
        return None

    def abort(self, key: Key) -> bool:
        """Forgets a sequence and frees its blocks at once; False if it is not here."""
        seq = self.requests.get(key)
        if seq is None:
            return False
        self._finish(seq, Status.FINISHED_ABORTED)
        return True

    def evict_all(self) -> tuple[list[Sequence], Deltas]:
        """The group's worker died. Gives back all sequences, in order of arrival, with nothing computed.

        Those in flight count a crash; at MAX_CRASHES in a row without a token they end with an error instead.
        """
        back: list[Sequence] = []
        deltas: Deltas = {}
        for seq in sorted(self.requests.values(), key=lambda seq: seq.order):
            seq.crashes += seq.last_step > self._done
            seq.forks.clear()
            self.space.free(seq)
            seq.slot = seq.last_step = -1
            seq.total = len(seq.tokens)
            if seq.crashes < MAX_CRASHES:
                seq.status = Status.WAITING
                back.append(seq)
            else:
                seq.status = Status.FINISHED_ERROR
                message = f"The request was running when its worker died, {MAX_CRASHES} times in a row."
                deltas.setdefault(seq.peer, []).append(self._delta(seq, [], message=message))
        self.requests.clear()
        self.running.clear()
        self.admission.waiting.drain()
        self._held.clear()
        self._in_flight.clear()
        return back, deltas

    def withdraw_waiting(self) -> list[Sequence]:
        """Gives back the sequences that hold nothing here, in order, except forks that wait for a running leader."""
        back = self.admission.waiting.drain()
        for seq in list(back):
            back += [fork for fork in seq.forks if not fork.finished]
            seq.forks.clear()
        for seq in back:
            del self.requests[seq.key]
        return sorted(back, key=lambda seq: seq.order)

    def _release_forks(self, seq: Sequence) -> None:
        """Siblings need not wait for this one's prompt any more."""
        for fork in seq.forks:
            if not fork.finished:
                self.admission.enqueue(fork)
        seq.forks.clear()

    def _vacate(self, seq: Sequence) -> None:
        """Takes slot and blocks from a running sequence; the next plan tells the workers."""
        self.space.free(seq)
        self._slots.append(seq.slot)
        self._release.append(seq.slot)
        seq.slot = -1

    def _finish(self, seq: Sequence, status: Status) -> None:
        if seq.status == Status.RUNNING:
            self._vacate(seq)
            self._stale = True
        seq.status = status
        del self.requests[seq.key]
        self._release_forks(seq)
        self.admission.changed(seq)

    def _preempt(self, seq: Sequence) -> None:
        """Takes a running sequence off; it is recomputed later. What it published stays cached while there is room."""
        self._vacate(seq)
        seq.status = Status.PREEMPTED
        self.counters.preemptions += 1
        self._release_forks(seq)
        if seq.last_step > self._done:
            self._held.append(seq)  # its tokens in flight must be known before it can be admitted anew
        else:
            self.admission.enqueue(seq)

    # A step.

    def schedule(self, now: float) -> Plan | None:
        """The next plan; None when there is nothing to compute or enough in flight."""
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            return None
        self._drop_ended()
        step = Step(self._step + 1, now)
        prefills = self._plan_decodes(step)
        chunks, budget = share_budget(prefills, self._prompt_budget(step, prefills))
        budget = self._admit(step, budget)
        for seq, chunk in share_leftover(chunks, budget):
            if chunk:
                step.compute(seq, chunk)
        self.space.unpin()
        return self._send(step) if step.rows else None

    def _prompt_budget(self, step: Step, prefills: list[Sequence]) -> int:
        """Tokens of prompts that may go into the step, beside the decodes it has: as many as its time allows."""
        if not self.chunked:
            return self.budget
        decodes = len(step.rows)
        left = self.budget - decodes
        if not self._max_step or not (prefills or self.admission.waiting):
            return left
        context = prefills[0].scheduled if prefills else 0
        return self._step_time.chunk(decodes, step.keys(), context, self._max_step, left)

    def _drop_ended(self) -> None:
        if self._stale:
            self.running = [seq for seq in self.running if seq.status == Status.RUNNING]
            self._stale = False

    def _plan_decodes(self, step: Step) -> list[Sequence]:
        """Adds a row for each sequence with one token to go, in order of arrival; returns those with more."""
        prefills = []
        rows, slots, starts, blocks = step.rows, step.slots, step.starts, step.blocks
        number = step.number
        for seq in self.running:  # a preemption takes from its end
            start, total = seq.scheduled, seq.total
            if total - start > 1:
                prefills.append(seq)
            elif total < seq.max_len:  # else the token in flight is its last
                if start < seq.capacity:
                    blocks.append(NO_BLOCKS)
                elif self._make_room(seq):
                    blocks.append([self.space.grow(seq)])
                else:
                    break
                seq.scheduled = total
                seq.total = total + 1
                seq.last_step = number
                rows.append(seq)
                slots.append(seq.slot)
                starts.append(start)
        step.counts = [1] * len(rows)
        step.samples = [1] * len(rows)
        return prefills

    def _make_room(self, seq: Sequence) -> bool:
        """Preempts the latest arrivals until a block is free; False if that took the sequence itself.

        All that precede it in `running` have their rows already, and none of them is taken: blocks for a prompt are
        allocated whole at admission, so only decodes, walked in order of arrival, come here.
        """
        while not self.space.pool.can_allocate(1):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _admit(self, step: Step, budget: int) -> int:
        """Gives waiting sequences a slot while slots, blocks and budget last; returns the budget left."""
        if budget <= 0 or not self._slots or not self.admission.begin(self.running):
            return budget
        while budget > 0 and self._slots:
            found = self.admission.choose(self.requests, budget)
            if found is None:
                break
            budget -= self._start(step, *found, budget)
        self.admission.end(tried_all=budget > 0 and bool(self._slots))
        return budget

    def _start(self, step: Step, seq: Sequence, match: Match, budget: int) -> int:
        """Gives slot and blocks and adds the first row. Returns the tokens of the row."""
        copies = self.space.allocate(seq, match)
        self.counters.admitted(seq, shareable_leader(self.requests, seq), self.config.enable_prefix_caching)
        seq.slot = self._slots.pop()
        seq.status = RUNNING
        insort(self.running, seq, key=lambda seq: seq.order)
        count = seq.total - seq.scheduled
        count = min(count, budget) if self.chunked else count
        step.admitted(seq, copies, count)
        self.admission.started(seq)
        return count

    def _send(self, step: Step) -> Plan:
        self._step = step.number
        self._in_flight.append(step)
        self.counters.steps += 1
        self.counters.step_tokens += sum(step.counts)
        release, self._release = self._release, []
        return step.plan(self.epoch, release)

    # A result.

    def update(self, step: int, tokens: list[int], seconds: float = 0.0, idle: float = 0.0) -> Deltas:
        """Applies the result of the oldest plan in flight, the only loop over the outputs of a step.

        `seconds` is what the step took, 0 when unknown, `idle` how long the worker had waited for it. `tokens` holds
        one per sampled row, in order; -1 says that the row has no valid probabilities. Rows of ended sequences are
        skipped. Raises ValueError when this is not the result that is due.
        """
        plan = self._in_flight[0] if self._in_flight else None
        if plan is None or plan.number != step or len(tokens) != sum(plan.samples):
            raise ValueError(f"{len(tokens)} tokens of step {step} are not the result that is due")
        self._in_flight.popleft()
        self._done = step
        if seconds and self._max_step:
            self._step_time.observe(sum(plan.counts), plan.keys(), seconds)
        deltas: Deltas = {}
        accepted = 0
        for seq, start, count, token in zip(plan.rows, plan.starts, plan.counts, plan.expand(tokens), strict=True):
            end = start + count  # where the token's place is, if one was sampled
            if end < seq.event_at and token >= 0 and token not in seq.stops:
                seq.tokens.append(token)
                delta: Delta | None = Delta(seq.id, seq.attempt, end - seq.num_prompt, [token])
            else:
                delta = self._apply(seq, end, token)
            if delta is not None:
                accepted += len(delta.ids)
                items = deltas.get(seq.peer)
                if items is None:
                    deltas[seq.peer] = [delta]
                else:
                    items.append(delta)
        self.counters.generation_tokens += accepted
        if self._had_work:
            self.counters.idle += idle
        self._had_work = bool(self.requests)
        self._unhold()
        return deltas

    def _apply(self, seq: Sequence, end: int, token: int) -> Delta | None:
        """One row in full: its sequence may have ended, filled a block, or come to its first or last token."""
        if seq.finished:
            return None
        if token == NONSENSE:
            return self._fail(seq)
        if seq.status is RUNNING:
            self.space.publish(seq, end)
        if token == NOT_SAMPLED:
            return None
        seq.tokens.append(token)
        seq.crashes = 0
        if seq.status is RUNNING:
            seq.shareable = True
            self._release_forks(seq)
            seq.event_at = min(seq.publish_at, seq.max_len - 1)
        status = self.limits.end_of(seq)
        if status is not None:
            self.admission.estimate.ended(seq.num_output)
            self._finish(seq, status)
        return self._delta(seq, [token])

    def _fail(self, seq: Sequence) -> Delta:
        """Ends a sequence for which the model computed nonsense, and keeps its blocks from others."""
        self.space.distrust(seq)
        self._finish(seq, Status.FINISHED_ERROR)
        return self._delta(seq, [], message="The model computed no valid probabilities for the next token.")

    def _delta(self, seq: Sequence, ids: list[int], message: str = "") -> Delta:
        """A delta of any kind; the first of an attempt says what was cached."""
        cached, seq.unreported = seq.cached if seq.unreported else -1, False
        finish = FINISH_REASONS.get(seq.status, "")
        stop_token = self.limits.stop_token(seq)
        return Delta(seq.id, seq.attempt, seq.num_output - len(ids), ids, finish, stop_token, cached, message)

    def _unhold(self) -> None:
        """The results of all plans that had rows of a preempted sequence are in, as only the newer plan has none."""
        for seq in self._held:
            if not seq.finished:
                seq.total = len(seq.tokens)
                self.admission.enqueue(seq)
        self._held.clear()

    # What others want to know.

    def has_work(self) -> bool:
        return bool(self.requests)

    def cached_tokens(self, seq: Sequence) -> int:
        """Tokens of the sequence that this group's prefix cache holds."""
        return self.space.match(seq, None).matched

    @property
    def queued_tokens(self) -> int:
        """Tokens of the sequences that wait for admission."""
        return self.admission.waiting.tokens

    @property
    def num_running(self) -> int:
        return self.max_running - len(self._slots)

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - self.num_running

    def stats(self, group: int, now: float) -> GroupStats:
        """The group's state for /metrics and /health."""
        stats = self.counters.stats(group, self.config)
        stats.ready = True
        stats.running = self.num_running
        stats.waiting = self.num_waiting
        stats.num_blocks = self.space.pool.num_blocks
        stats.kv_usage = self.space.usage()
        stats.stalled = now - self._in_flight[0].planned_at if self._in_flight else 0.0
        return stats

    def check(self) -> None:
        """Raises AssertionError unless everything adds up: for tests, after every step."""
        running = [seq for seq in self.requests.values() if seq.status == Status.RUNNING]
        self.space.check(self.requests.values())
        assert sorted(running, key=lambda seq: seq.order) == [s for s in self.running if s.status == Status.RUNNING]
        slots = sorted([seq.slot for seq in running] + self._slots)
        assert slots == list(range(self.max_running)), "slots differ from the running sequences"
        for seq in self.requests.values():
            assert not seq.finished
            assert seq.status != Status.PREEMPTED or not seq.forks
            assert seq.total >= len(seq.tokens)
            assert seq.scheduled <= seq.total
            assert len(seq.tokens) < seq.max_len
            assert seq.status != Status.RUNNING or seq.capacity >= min(seq.scheduled, len(seq.tokens))
            assert seq.status == Status.RUNNING or (not seq.blocks and seq.slot < 0 and not seq.shareable)
        waiting = (
            set(self.admission.waiting)
            | set(self._held)
            | {fork for seq in self.requests.values() for fork in seq.forks}
        )
        assert {seq for seq in waiting if not seq.finished} == set(self.requests.values()) - set(running)

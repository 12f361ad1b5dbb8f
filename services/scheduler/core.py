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

from services.scheduler.block_space import BlockSpaceManager
from services.scheduler.policy import POLICIES, PeakEstimate, WaitingQueue, share_budget, share_leftover
from services.scheduler.request import FINISH_REASONS, Key, Sequence, Status
from services.scheduler.step import Step
from shared.config import EngineConfig
from shared.errors import RequestError
from shared.messages import Delta, GroupStats, Plan

Deltas = dict[bytes, list[Delta]]  # by api process

MAX_IN_FLIGHT = 2  # plans
MAX_CRASHES = 3
LOOKAHEAD = 8  # waiting sequences tried when the first does not fit
MAX_BYPASS = 64  # later arrivals admitted before one that does not fit


class Counters:
    """What a group has done since the scheduler started; outlives the group's workers."""

    __slots__ = (
        "generation_tokens",
        "preemptions",
        "prefix_hits",
        "prefix_queries",
        "prompt_tokens",
        "step_tokens",
        "steps",
    )

    def __init__(self) -> None:
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.steps = 0
        self.step_tokens = 0


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
        self.epoch = epoch
        self.counters = counters or Counters()
        self.space = BlockSpaceManager(num_blocks, config.block_size, config.enable_prefix_caching)
        self.block_size = config.block_size
        self.max_len = min(max_model_len, num_blocks * config.block_size)
        self.max_model_len = max_model_len
        self.chunked = config.enable_chunked_prefill
        # Whole prompts need a budget that takes the longest; decodes then come on top of it.
        self.budget = config.max_num_batched_tokens if self.chunked else max(config.max_num_batched_tokens, max_model_len)
        # Each running sequence has a token to compute in each step, so none starves.
        self.max_running = min(config.max_num_seqs, self.budget)
        self.requests: dict[Key, Sequence] = {}
        self.running: list[Sequence] = []  # by order of arrival; ended ones are dropped before the next plan
        self.waiting = WaitingQueue(POLICIES[config.scheduling_policy])
        self._eos = frozenset(eos_token_ids)
        self._estimate = PeakEstimate(config.block_size)
        self._slots = list(range(self.max_running - 1, -1, -1))
        self._release: list[int] = []
        self._in_flight: deque[Step] = deque()
        self._held: list[Sequence] = []  # preempted, with results still to come
        self._stale = False  # `running` holds ended sequences
        self._blocked_free = -1  # allocatable blocks when admission last failed
        self._step = 0
        self._done = 0  # the last step whose result is known

    # Requests come and go.

    def add(self, seq: Sequence) -> Delta | None:
        """Takes a new sequence, or one from another group. Returns its last delta if there is nothing left to generate.

        Raises RequestError when it can never be served here.
        """
        seq.max_len = self._limit(seq)
        seq.stops = self._stops(seq)
        output = seq.num_output
        if output and self._finish_status(seq, seq.tokens[-1]) is not None:
            return self._final(seq)
        if len(seq.tokens) >= self.max_len:
            if output:
                seq.status = Status.FINISHED_LENGTH
                return Delta(seq.id, seq.attempt, output, [], FINISH_REASONS[seq.status])
            self._refuse(seq)
        self.requests[seq.key] = seq
        leader = self.requests.get(seq.fork_key) if seq.fork_key else None
        if leader is not None and leader is not seq and not leader.shareable and leader.status != Status.PREEMPTED:
            leader.forks.append(seq)
        else:
            self._enqueue(seq)
        return None

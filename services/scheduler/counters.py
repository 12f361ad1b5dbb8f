"""What a worker group has done."""

from __future__ import annotations

from services.scheduler.request import Sequence
from shared.config import EngineConfig
from shared.messages import GroupStats


class Counters:
    """What a group has done since the scheduler started; outlives the group's workers."""

    __slots__ = (
        "generation_tokens",
        "idle",
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
        self.idle = 0.0  # seconds

    def admitted(self, seq: Sequence, leader: Sequence | None, caching: bool) -> None:
        """Counts a prompt once, at its first admission, after its blocks were found or allocated.

        A sample that shares with its leader, or what is computed again after a preemption, is no reuse.
        """
        if seq.cached >= 0:
            return
        seq.cached = leader.cached if leader is not None else min(seq.scheduled, seq.num_prompt)
        if seq.fork_key is None:
            self.prompt_tokens += seq.num_prompt
            if caching:
                self.prefix_queries += seq.num_prompt
                self.prefix_hits += seq.cached

    def stats(self, group: int, config: EngineConfig) -> GroupStats:
        """The counters as statistics of a group that is not ready."""
        return GroupStats(
            group=group,
            ready=False,
            running=0,
            waiting=0,
            swapped=0,
            num_blocks=0,
            block_size=config.block_size,
            kv_usage=0.0,
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            preemptions=self.preemptions,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            steps=self.steps,
            stalled=0.0,
            step_tokens=self.step_tokens,
            idle=self.idle,
        )

"""Gives sequences their KV blocks: shared, copied or new, and takes them back."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.block_pool import BlockPool
from services.scheduler.prefix_cache import Match, PrefixCache
from services.scheduler.request import Sequence


class BlockSpaceManager:
    """Block tables over one pool and its prefix cache. A table only ever grows, until it is freed whole.

    prompt: | full blocks   | partly matching block   | the rest             |
            | shared, ref+1 | copied before the step  | new blocks, computed |
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, block_size, prefix_caching)
        self._pinned: list[int] = []

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def match(self, seq: Sequence, leader: Sequence | None) -> Match:
        """What the sequence can reuse: of the sample it is a fork of, else of the prefix cache."""
        shared = self._match_leader(seq, leader) if leader is not None else None
        return shared or self.cache.match(seq.tokens, seq.salt)

    def _match_leader(self, seq: Sequence, leader: Sequence) -> Match | None:
        """What a sample can share with the first one, whose prompt is computed; None when their prompts differ."""
        prompt = seq.num_prompt
        if prompt != leader.num_prompt or seq.tokens[:prompt] != leader.tokens[:prompt] or seq.salt != leader.salt:
            return None
        matched = min(prompt, len(seq.tokens) - 1)
        full, partial = divmod(matched, self.block_size)
        node = leader.node
        if node is not None:
            for _ in range(leader.publish_at // self.block_size - 1 - full):
                assert node is not None
                node = node.parent
        return Match(matched, leader.blocks[:full], leader.blocks[full] if partial else -1, node)

    def room_after(self, seq: Sequence, match: Match) -> int:
        """Allocatable blocks left once the sequence has its own; negative when they do not suffice."""
        idle = sum(not self.pool.refs(block) for block in match.blocks)
        return self.pool.num_free - idle - self.blocks_for(len(seq.tokens)) + len(match.blocks)

    def allocate(self, seq: Sequence, match: Match) -> list[int]:
        """Gives the sequence blocks for all its tokens; `room_after` must not be negative.

        Returns [source, destination] when a partly matching block is to be copied, else []. The source stays pinned
        until `unpin`, so that no copy of the same plan overwrites it. Where that would take the last free block, the
        partial match is given up.
        """
        if self.cache.enabled:
            seq.node = self.cache.hold(match.node or self.cache.root(seq.salt))
        shared = len(match.blocks)
        self.pool.touch(match.blocks)
        need = self.blocks_for(len(seq.tokens)) - shared
        copy = match.source >= 0
        if copy:
            self.pool.touch((match.source,))
            copy = self.pool.can_allocate(need)
            if copy:
                self._pinned.append(match.source)
            else:
                self.pool.free((match.source,))
        seq.blocks = match.blocks + [self.pool.allocate() for _ in range(need)]
        seq.capacity = len(seq.blocks) * self.block_size
        seq.publish_at = (shared + 1) * self.block_size
        seq.scheduled = match.matched if copy else shared * self.block_size
        return [match.source, seq.blocks[shared]] if copy else []

    def unpin(self) -> None:
        """The plan that copies is complete."""
        self.pool.free(self._pinned)
        self._pinned.clear()

    def grow(self, seq: Sequence) -> int:
        """One more block at the end of the table. Raises IndexError when there is none."""
        block = self.pool.allocate()
        seq.blocks.append(block)
        seq.capacity += self.block_size
        return block

    def publish(self, seq: Sequence, computed: int) -> None:
        """The first `computed` tokens of the sequence lie in its blocks: let others find the full ones."""
        size = self.block_size
        while seq.publish_at <= computed:
            end = seq.publish_at
            if seq.node is not None:
                seq.node = self.cache.publish(seq.node, seq.tokens[end - size : end], seq.blocks[end // size - 1])
            seq.publish_at = end + size

    def free(self, seq: Sequence) -> None:
        """Takes all blocks back; the cache keeps the published ones as long as nobody needs the room."""
        self.pool.free(seq.blocks)
        if seq.node is not None:
            self.cache.release(seq.node)
        seq.node = None
        seq.blocks = []
        seq.capacity = seq.scheduled = seq.event_at = 0
        seq.shareable = False

    def distrust(self, seq: Sequence) -> None:
        """The sequence computed nonsense: its blocks must not serve others."""
        for block in seq.blocks:
            self.cache.forget(block)

    def usage(self) -> float:
        """Share of the blocks that sequences hold, 0 to 1."""
        return self.pool.num_referenced / self.pool.num_blocks

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless pool, cache and tables add up. Not to be called while a plan is being made."""
        tables, nodes = [], []
        for seq in sequences:
            tables.append(seq.blocks)
            if seq.node is not None:
                nodes.append(seq.node)
            assert seq.capacity == len(seq.blocks) * self.block_size
            assert len(set(seq.blocks)) == len(seq.blocks), "a block is twice in a table"
        self.pool.check(tables)
        self.cache.check(nodes)

"""The KV blocks of one worker group: who holds them, and which to reuse first.

Every block is exactly one of
    free        its content is worth nothing
    cached      nobody holds it, but the prefix cache knows its content; least recently used first out
    referenced  in the tables of one sequence or several
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """Blocks 0 to num_blocks - 1 with reference counts. All operations are O(1) per block."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] = lambda block: None) -> None:
        """`on_evict` is told of every cached block that is about to be given to another content."""
        self.num_blocks = num_blocks
        self.on_evict = on_evict
        self._refs = [0] * num_blocks
        self._published = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_free

    def refs(self, block: int) -> int:
        """How many holders the block has."""
        return self._refs[block]

    def can_allocate(self, count: int) -> bool:
        return count <= self.num_free

    def allocate(self) -> int:
        """A block with one reference, evicting the least recently used cached one if none is free.

        Raises IndexError when all blocks are referenced.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._published[block] = 0
            self.on_evict(block)
        else:
            raise IndexError(f"all {self.num_blocks} blocks are in use")
        self._refs[block] = 1
        return block

    def touch(self, blocks: Iterable[int]) -> None:
        """One more reference to each of the blocks, which are cached or referenced."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One reference less to each block of a table, given from its first on; the tail becomes reusable first.

        So a cached block is never evicted before the blocks that continue it.
        """
        for block in reversed(list(blocks)):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._published[block]:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def publish(self, block: int) -> None:
        """The prefix cache now knows the content of this referenced block: keep it when it is freed."""
        self._published[block] = 1

    def unpublish(self, block: int) -> None:
        """The content is no longer known to the prefix cache."""
        self._published[block] = 0
        if self._refs[block] == 0:
            del self._cached[block]
            self._free.append(block)

    def published(self, block: int) -> bool:
        return bool(self._published[block])

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Raises AssertionError unless the pool adds up to the tables of all sequences."""
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts == self._refs, "reference counts differ from the tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for block, refs in enumerate(self._refs):
            states = (block in free) + (block in self._cached) + (refs > 0)
            assert states == 1, f"block {block} is in {states} states"
            assert block not in free or not self._published[block], f"free block {block} is published"
            assert block not in self._cached or self._published[block], f"cached block {block} is not published"

"""The block pool: free, cached and referenced blocks, and the order of reuse."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.block_pool import BlockPool


def test_counts_follow_allocation_and_release() -> None:
    pool = BlockPool(3)
    table = [pool.allocate() for _ in range(3)]
    assert sorted(table) == [0, 1, 2]
    assert (pool.num_free, pool.num_referenced) == (0, 3)
    assert not pool.can_allocate(1)
    with pytest.raises(IndexError, match="all 3 blocks"):
        pool.allocate()
    pool.free(table)
    assert pool.can_allocate(3)
    assert not pool.can_allocate(4)


def test_shared_blocks_are_free_when_the_last_holder_leaves() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.touch([block])
    assert pool.refs(block) == 2
    pool.free([block])
    assert pool.num_free == 1
    pool.free([block])
    assert pool.num_free == 2


def test_worthless_blocks_go_first_then_the_least_recently_used_cached_one_tail_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(5, evicted.append)
    old = [pool.allocate(), pool.allocate()]
    new = [pool.allocate(), pool.allocate()]
    for block in old + new:
        pool.publish(block)
    pool.free(old)
    pool.free(new)
    assert pool.allocate() == 4
    assert not evicted
    assert [pool.allocate() for _ in range(4)] == [old[1], old[0], new[1], new[0]]
    assert evicted == [old[1], old[0], new[1], new[0]]


def test_a_touched_block_is_not_evicted_and_becomes_the_most_recently_used() -> None:
    pool = BlockPool(2)
    table = [pool.allocate(), pool.allocate()]
    for block in table:
        pool.publish(block)
    pool.free(table)
    pool.touch([table[1]])
    pool.free([table[1]])
    assert [pool.allocate(), pool.allocate()] == table


def test_an_unpublished_block_loses_its_place() -> None:
    pool = BlockPool(2)
    held, freed = pool.allocate(), pool.allocate()
    pool.publish(held)
    pool.publish(freed)
    pool.free([freed])
    pool.unpublish(freed)
    pool.unpublish(held)
    pool.check([[held]])
    pool.free([held])
    pool.check([])
    assert pool.num_free == 2


def test_check_finds_a_leak_a_double_free_and_a_lost_block() -> None:
    pool = BlockPool(3)
    table = [pool.allocate()]
    pool.check([table])
    with pytest.raises(AssertionError, match="differ"):
        pool.check([])
    pool.free(table)
    pool._free.append(table[0])
    with pytest.raises(AssertionError, match="twice"):
        pool.check([])
    pool._free = [block for block in pool._free if block != table[0]]
    with pytest.raises(AssertionError, match="in 0 states"):
        pool.check([])


class PoolMachine(RuleBasedStateMachine):
    """Against a model that keeps tables, and the cached blocks as a list."""

    @initialize(size=st.integers(1, 8))
    def start(self, size: int) -> None:
        self.pool = BlockPool(size, self.evicted)
        self.tables: list[list[int]] = []
        self.published: set[int] = set()
        self.lru: list[int] = []

    def evicted(self, block: int) -> None:
        assert block == self.lru.pop(0)
        self.published.discard(block)

    def held(self) -> set[int]:
        return {block for table in self.tables for block in table}

    @precondition(lambda self: self.pool.can_allocate(1))
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.num_free))
        before = self.held()
        table = [self.pool.allocate() for _ in range(count)]
        assert len(set(table)) == count
        assert not before & set(table)
        assert not self.published & set(table)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.touch(table)
        self.tables.append(list(table))

    @precondition(lambda self: self.lru)
    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.lru))
        self.pool.touch([block])
        self.lru.remove(block)
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held())))
        self.pool.publish(block)
        self.published.add(block)

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def unpublish(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.published)))
        self.pool.unpublish(block)
        self.published.discard(block)
        if block in self.lru:
            self.lru.remove(block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)
        self.lru += [block for block in reversed(table) if block in self.published and block not in self.held()]

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.tables)
            assert self.pool.num_referenced == len(self.held())
            assert {b for b in range(self.pool.num_blocks) if self.pool.published(b)} == self.published


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

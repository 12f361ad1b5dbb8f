"""The prefix cache against a plain search through all contents."""

from __future__ import annotations

import random
from array import array

import pytest

from services.scheduler.block_pool import BlockPool
from services.scheduler.prefix_cache import Node, PrefixCache

SIZE = 4


class Harness:
    """Publishes whole token lists as a sequence would, and remembers what each block holds."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, SIZE)
        self.contents: dict[int, tuple[str, tuple[int, ...]]] = {}  # block -> salt, all tokens up to its end
        self.tables: list[tuple[list[int], Node]] = []
        evict = self.pool.on_evict

        def evicted(block: int) -> None:
            evict(block)
            self.contents.pop(block, None)

        self.pool.on_evict = evicted

    def store(self, tokens: list[int], salt: str = "") -> list[int]:
        """Computes a sequence: shared blocks first, then new ones, published; the table stays held."""
        data = array("i", tokens)
        match = self.cache.match(data, salt)
        node = self.cache.hold(match.node or self.cache.root(salt))
        self.pool.touch(match.blocks)
        table = list(match.blocks)
        while (len(table) + 1) * SIZE <= len(tokens):
            block = self.pool.allocate()
            end = (len(table) + 1) * SIZE
            node = self.cache.publish(node, data[end - SIZE : end], block)
            if node.block == block:
                self.contents[block] = (salt, tuple(tokens[:end]))
            table.append(block)
        self.tables.append((table, node))
        return table

    def drop(self, index: int = -1) -> None:
        table, node = self.tables.pop(index)
        self.pool.free(table)
        self.cache.release(node)

    def matched(self, tokens: list[int], salt: str = "") -> int:
        match = self.cache.match(array("i", tokens), salt)
        full = len(match.blocks) * SIZE
        for i, block in enumerate(match.blocks):
            assert self.contents[block] == (salt, tuple(tokens[: (i + 1) * SIZE]))
        if match.matched > full:
            source_salt, source = self.contents[match.source]
            assert source_salt == salt
            assert source[: match.matched] == tuple(tokens[: match.matched])
        else:
            assert match.source == -1
        return match.matched

    def longest(self, tokens: list[int], salt: str) -> int:
        """The best answer by plain search: whole blocks, each there, then the best partial one."""
        there = {content for s, content in self.contents.values() if s == salt}
        full = 0
        while full + SIZE < len(tokens) and tuple(tokens[: full + SIZE]) in there:
            full += SIZE
        best = 0
        for content in there:
            if len(content) == full + SIZE and list(content[:full]) == tokens[:full]:
                common = 0
                while (
                    common < SIZE
                    and full + common < len(tokens) - 1
                    and content[full + common] == tokens[full + common]
                ):
                    common += 1
                best = max(best, common)
        return full + best

    def check(self) -> None:
        self.pool.check(table for table, _ in self.tables)
        self.cache.check(node for _, node in self.tables)


def test_the_last_token_is_never_matched() -> None:
    harness = Harness()
    harness.store([1, 2, 3, 4, 5, 6, 7, 8])
    assert harness.matched([1, 2, 3, 4, 5, 6, 7, 8]) == 7
    assert harness.matched([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    assert harness.matched([1, 2, 3, 4]) == 3
    assert harness.matched([1]) == 0


def test_a_match_is_as_fine_as_a_token() -> None:
    harness = Harness()
    harness.store([1, 2, 3, 4, 5, 6, 7, 8])
    for common in range(9):
        tokens = [*range(1, common + 1), *[99] * 9]
        assert harness.matched(tokens) == common


def test_equal_blocks_after_other_beginnings_are_not_mixed_up() -> None:
    harness = Harness()
    harness.store([1, 1, 1, 1, 5, 5, 5, 5])
    harness.store([2, 2, 2, 2, 5, 5, 5, 5])
    assert harness.matched([3, 3, 3, 3, 5, 5, 5, 5, 5]) == 0
    assert harness.matched([2, 2, 2, 2, 5, 5, 5, 5, 5]) == 8


def test_salts_are_apart_even_odd_ones() -> None:
    harness = Harness()
    harness.store([1, 2, 3, 4], "a")
    harness.store([1, 2, 3, 4], "\ud83d")
    assert harness.matched([1, 2, 3, 4, 5], "a") == 4
    assert harness.matched([1, 2, 3, 4, 5], "\ud83d") == 4
    assert harness.matched([1, 2, 3, 4, 5], "") == 0


def test_a_freed_content_is_found_until_its_room_is_needed() -> None:
    harness = Harness(num_blocks=2)
    harness.store([1, 2, 3, 4, 5, 6, 7, 8])
    harness.drop()
    assert harness.matched([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    harness.store([9, 9, 9, 9])
    assert harness.matched([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4
    harness.check()


def test_a_content_computed_twice_is_kept_once_and_continues_both() -> None:
    harness = Harness(num_blocks=4)
    pool, cache = harness.pool, harness.cache
    root = cache.root()
    one, other = cache.hold(root), cache.hold(root)
    first, second = pool.allocate(), pool.allocate()
    one = cache.publish(one, array("i", [1, 2, 3, 4]), first)
    other = cache.publish(other, array("i", [1, 2, 3, 4]), second)
    assert one is other
    assert (pool.published(first), pool.published(second)) == (True, False)
    third = pool.allocate()
    other = cache.publish(other, array("i", [5, 6, 7, 8]), third)
    pool.free([first])
    cache.release(one)
    blocks = [pool.allocate(), pool.allocate()]  # evicts the first: what continues it cannot be reached
    query = array("i", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cache.match(query).matched == 0
    cache.check([other])
    again = cache.publish(cache.hold(cache.root()), array("i", [1, 2, 3, 4]), blocks[0])
    assert cache.match(query).matched == 8
    assert cache.match(query).blocks == [blocks[0], third]
    cache.check([again, other])
    for node in (again, other):
        cache.release(node)
    cache.check([])


def test_forgetting_a_block_leaves_the_rest() -> None:
    harness = Harness()
    table = harness.store([1, 2, 3, 4, 5, 6, 7, 8])
    harness.cache.forget(table[1])
    harness.cache.forget(table[1])
    assert harness.matched([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4
    harness.drop()
    harness.check()


def test_an_empty_cache_keeps_no_nodes() -> None:
    harness = Harness(num_blocks=3)
    harness.store([1, 2, 3, 4, 5, 6, 7, 8], "salt")
    harness.drop()
    for _ in range(3):
        harness.pool.allocate()
    assert harness.cache._roots == {}
    assert harness.cache._nodes == {}
    harness.cache.release(harness.cache.hold(harness.cache.root("unused")))
    assert harness.cache._roots == {}


@pytest.mark.parametrize("seed", range(12))
def test_random_histories_match_a_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    harness = Harness(num_blocks=12)
    for _ in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
        salt = rng.choice(["", "s"])
        assert harness.matched(tokens, salt) == harness.longest(tokens, salt)
        if harness.tables and rng.random() < 0.45:
            harness.drop(rng.randrange(len(harness.tables)))
        elif harness.pool.can_allocate(len(tokens) // SIZE + 3):
            harness.store(tokens, salt)
        if harness.tables and rng.random() < 0.05:
            table = rng.choice(harness.tables)[0]
            for block in table:
                harness.cache.forget(block)
                harness.contents.pop(block, None)
        harness.check()

"""Finds the KV blocks of a prompt's beginning among those already computed.

A tree of contents: each node stands for one full block of tokens after its parent's, the root for a cache salt. A child
is found by its token bytes, so equal paths are equal tokens and no hash is trusted. A node lives as long as one of: the
block that holds its content, a child, a sequence that has come this far; so content computed again after an eviction
finds its old place and the blocks that continue it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from services.scheduler.block_pool import BlockPool

TOKEN_BYTES = array("i").itemsize


class Node:
    """The content of one block, after that of its parent."""

    __slots__ = ("block", "children", "ordered", "parent", "tokens", "users")

    def __init__(self, parent: Node | None, tokens: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block = -1  # the block that holds it; -1 when evicted
        self.children: dict[bytes, Node] | None = None
        self.ordered: list[bytes] | None = None  # sorted tokens of the children that have a block
        self.users = 0  # sequences whose last published block this is


class Match(NamedTuple):
    """What of a sequence's tokens the cache holds: `matched` tokens, in `blocks` and the beginning of `source`."""

    matched: int
    blocks: list[int]  # full blocks, to be shared
    source: int  # block to be copied for the rest, or -1
    node: Node | None  # of the last full block


class PrefixCache:
    """The prefix tree over one block pool; only full, computed blocks are ever in it."""

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool = True) -> None:
        self.enabled = enabled
        self.block_size = block_size
        self._pool = pool
        self._roots: dict[bytes, Node] = {}
        self._nodes: dict[int, Node] = {}  # by block
        pool.on_evict = self._evicted

    def match(self, tokens: array[int], salt: str = "") -> Match:
        """The longest cached beginning, of at most len(tokens) - 1 tokens: the last one must be computed to sample."""
        limit = len(tokens) - 1
        root = self._roots.get(_salt_bytes(salt))
        if root is None:
            return Match(0, [], -1, None)
        data = tokens.tobytes()
        size = self.block_size * TOKEN_BYTES
        node, blocks = root, []
        for end in range(size, limit * TOKEN_BYTES + 1, size):
            child = node.children.get(data[end - size : end]) if node.children else None
            if child is None or child.block < 0:
                break
            node = child
            blocks.append(child.block)
        matched = len(blocks) * self.block_size
        rest = data[matched * TOKEN_BYTES : min(matched + self.block_size, limit) * TOKEN_BYTES]
        common, source = self._partial(node, rest)
        return Match(matched + common, blocks, source, node)

    def _partial(self, node: Node, rest: bytes) -> tuple[int, int]:
        """How many tokens of `rest` the best child of the node begins with, and its block."""
        if not node.ordered or not rest:
            return 0, -1
        assert node.children is not None
        # The longest common prefix with a sorted list is with a neighbour of the place where it would be inserted.
        place = bisect_left(node.ordered, rest)
        best, source = 0, -1
        for tokens in node.ordered[max(place - 1, 0) : place + 1]:
            common = _common(tokens, rest)
            if common > best:
                best, source = common, node.children[tokens].block
        return best, source

    def root(self, salt: str = "") -> Node:
        """The node to begin at."""
        key = _salt_bytes(salt)
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Node(None, key)
        return root

    def hold(self, node: Node) -> Node:
        """A sequence has come to this node. Every hold ends in a `release`."""
        node.users += 1
        return node

    def release(self, node: Node) -> None:
        """The sequence has left."""
        node.users -= 1
        self._prune(node)

    def publish(self, node: Node, tokens: array[int], block: int) -> Node:
        """`block`, computed and full, holds `tokens` after the content of the held `node`. Moves the hold on.

        When the content is there already, that block stays the one that is found.
        """
        data = tokens.tobytes()
        if node.children is None:
            node.children = {}
        child = node.children.get(data)
        if child is None:
            child = node.children[data] = Node(node, data)
        if child.block < 0:
            child.block = block
            if node.ordered is None:
                node.ordered = []
            insort(node.ordered, data)
            self._nodes[block] = child
            self._pool.publish(block)
        child.users += 1
        node.users -= 1
        return child

    def forget(self, block: int) -> None:
        """The content of this block is not to be found any more."""
        if block in self._nodes:
            self._pool.unpublish(block)
            self._evicted(block)

    def _evicted(self, block: int) -> None:
        node = self._nodes.pop(block)
        node.block = -1
        parent = node.parent
        assert parent is not None
        assert parent.ordered is not None
        del parent.ordered[bisect_left(parent.ordered, node.tokens)]
        self._prune(node)

    def _prune(self, node: Node) -> None:
        while node.block < 0 and not node.children and not node.users:
            parent = node.parent
            if parent is None:
                del self._roots[node.tokens]
                return
            assert parent.children is not None
            del parent.children[node.tokens]
            node = parent

    def check(self, held: Iterable[Node]) -> None:
        """Raises AssertionError unless the tree is sound and fits the pool and the nodes held by sequences."""
        users = Counter(held)
        seen: dict[int, Node] = {}
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            assert node.block >= 0 or node.children or node.users > 0, "a node without purpose"
            assert node.users == users.pop(node, 0), "a node's users differ from the sequences"
            children = node.children or {}
            with_block = sorted(tokens for tokens, child in children.items() if child.block >= 0)
            assert with_block == (node.ordered or []), "the sorted children are not the children"
            for tokens, child in children.items():
                assert child.parent is node
                assert child.tokens == tokens
                assert len(tokens) == self.block_size * TOKEN_BYTES
                if child.block >= 0:
                    assert child.block not in seen, f"block {child.block} has two contents"
                    seen[child.block] = child
                stack.append(child)
        assert not users, "a sequence holds a node that is not in the tree"
        assert seen == self._nodes
        published = {block for block in range(self._pool.num_blocks) if self._pool.published(block)}
        assert published == set(seen), "pool and cache disagree about what is published"


def _salt_bytes(salt: str) -> bytes:
    return salt.encode("utf-8", "surrogatepass")


def _common(a: bytes, b: bytes) -> int:
    """Tokens that both begin with."""
    for i in range(0, min(len(a), len(b)), TOKEN_BYTES):
        if a[i : i + TOKEN_BYTES] != b[i : i + TOKEN_BYTES]:
            return i // TOKEN_BYTES
    return min(len(a), len(b)) // TOKEN_BYTES

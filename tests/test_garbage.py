"""A settled process still frees cycles, but does not search what it has loaded."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from shared.garbage import YOUNG, settle

class Node:
    pass

kept = [Node() for _ in range(1000)]
settle()
assert gc.get_freeze_count() > 1000
assert not any(each is kept[0] for each in gc.get_objects())
node = Node()
node.itself = node
gone = weakref.ref(node)
del node
young = []
while gone() is not None:
    young.append([])
    assert len(young) <= YOUNG + 1000, "the cycle is never found"
assert len(young) > YOUNG // 2, "searched too often"
"""


def test_cycles_are_found_after_many_objects() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)

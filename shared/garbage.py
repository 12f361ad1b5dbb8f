"""When Python looks for reference cycles."""

from __future__ import annotations

import gc

YOUNG = 10_000  # objects made and not yet gone, from which on the young ones are looked through


def settle() -> None:
    """To be called once a process has loaded what it keeps: that is never looked at again, and the rest seldom.

    Messages hold no cycles and die by reference count; with Python's default of 700 every few steps pay for a search.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)

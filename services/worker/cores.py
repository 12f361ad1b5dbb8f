"""How many cores this process may use: its affinity, or less where a control group (v1 or v2) limits its time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Cores to plan threads for, at least 1. A quota of 1.5 cores is 1: a second thread would only use it up sooner."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min([cores, *(int(quota) for quota in quotas(root))]))


def quotas(root: Path) -> Iterator[float]:
    """Cores' worth of time that each control group above this process allows; none where there is no limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, read = root / "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = _mount_v1(root, controllers), _quota_v1
        else:
            continue
        folder = base / group.strip("/")
        if not folder.is_dir():  # inside a container the path is the host's, and the own group is the root
            folder = base
        for above in (folder, *folder.parents):
            quota = read(above)
            if quota:
                yield quota
            if above == base:
                break


def _mount_v1(root: Path, controllers: str) -> Path:
    """Where the controller is mounted: beside those it shares a hierarchy with ("cpu,cpuacct"), or by its own name."""
    together = root / "sys/fs/cgroup" / controllers
    return together if together.is_dir() else root / "sys/fs/cgroup/cpu"


def _quota_v2(folder: Path) -> float | None:
    return _ratio(_words(folder / "cpu.max"))


def _quota_v1(folder: Path) -> float | None:
    return _ratio(_words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us"))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _ratio(words: list[str]) -> float | None:
    """Quota over period, both in microseconds; "max" and -1 are no limit."""
    if len(words) != 2 or not all(word.isdigit() and int(word) for word in words):
        return None
    return int(words[0]) / int(words[1])

"""CPU time and resident memory of the server's processes by role, read from /proc."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROLE = re.compile(r"-m\0services\.(api|tokenizer|scheduler|worker)\0")


@dataclass(frozen=True)
class Usage:
    """What a role's processes have used together."""

    cpu: float  # seconds
    resident: int  # bytes


def find() -> dict[int, str]:
    """The pids of pagebus processes on this machine and their roles."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue  # it has ended
        match = ROLE.search(command)
        if match:
            found[int(folder.name)] = match[1]
    return found


def session(leader: int) -> list[int]:
    """The leader of a session, first, and everything it or a descendant of it has started."""
    parents, members = {}, {leader}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        pid = int(folder.name)
        parents[pid] = int(fields[1])
        if int(fields[3]) == leader:
            members.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= more
    return [leader, *sorted((members & parents.keys()) - {leader})]


def proportional(pids: Iterable[int]) -> int:
    """Bytes resident, what processes share divided among them."""
    total = 0
    for pid in pids:
        try:
            found = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
        except OSError:
            continue  # it has ended
        total += int(found[1]) << 10 if found else 0
    return total


def parse(text: str) -> dict[int, str]:
    """`role:pid,role:pid`, or pids alone. Raises ValueError."""
    pairs = [part.rpartition(":") for part in text.split(",")]
    return {int(pid): role or "server" for role, _, pid in pairs}


def usage(pids: dict[int, str]) -> dict[str, Usage]:
    """The usage of each role, to the microsecond; a process or a thread that has ended counts nothing."""
    cpu: dict[str, float] = defaultdict(float)
    resident: dict[str, int] = defaultdict(int)
    for pid, role in pids.items():
        try:
            threads = [int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue
        cpu[role] += sum(threads) * 1e-9
        resident[role] += pages * os.sysconf("SC_PAGE_SIZE")
    return {role: Usage(cpu[role], resident[role]) for role in cpu}


def descriptors(pids: dict[int, str]) -> dict[str, int]:
    """Open file descriptors of each role."""
    count: dict[str, int] = defaultdict(int)
    for pid, role in pids.items():
        count[role] += len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return dict(count)

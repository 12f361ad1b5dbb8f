"""Cores by affinity and by the quotas of made-up control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.worker import cores
from services.worker.cores import usable_cores


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def tree(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A file system with /proc/self/cgroup and files under /sys/fs/cgroup."""
    whole = {"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for path, text in whole.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max 100000", 8),
        ("150000 100000", 1),
        ("200000 100000", 2),
        ("50000 100000", 1),
        ("1000 100000", 1),
        ("350000 50000", 7),
        ("6400000 100000", 8),
        ("0 100000", 8),
        ("100000 0", 8),
        ("", 8),
        ("nonsense", 8),
    ],
)
def test_v2_quota_is_rounded_down_and_at_least_one(tmp_path: Path, limit: str, expected: int) -> None:
    assert usable_cores(tree(tmp_path, "0::/\n", {"cpu.max": limit})) == expected


def test_v2_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {"cpu.max": "max 100000", "pod/cpu.max": "300000 100000", "pod/box/cpu.max": "500000 100000"}
    assert usable_cores(tree(tmp_path, "0::/pod/box\n", files)) == 3
    tree(tmp_path, "0::/pod/box\n", {"pod/box/cpu.max": "200000 100000"})
    assert usable_cores(tmp_path) == 2


def test_v2_in_a_container_the_own_group_is_the_root(tmp_path: Path) -> None:
    assert usable_cores(tree(tmp_path, "0::/docker/0123abcd\n", {"cpu.max": "400000 100000"})) == 4


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_v1(tmp_path: Path, mount: str) -> None:
    groups = "5:memory:/docker/7\n4:cpu,cpuacct:/docker/7\n1:name=systemd:/docker/7\n"
    files = {f"{mount}/cpu.cfs_quota_us": "-1", f"{mount}/cpu.cfs_period_us": "100000"}
    assert usable_cores(tree(tmp_path, groups, files)) == 8
    box = {f"{mount}/docker/7/cpu.cfs_quota_us": "250000", f"{mount}/docker/7/cpu.cfs_period_us": "100000"}
    assert usable_cores(tree(tmp_path, groups, box)) == 2


def test_without_control_groups_the_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores(tmp_path) == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})
    assert usable_cores(tmp_path) == 1


def test_where_there_is_no_affinity_all_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores(tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path) == 1


def test_here_the_readings_make_sense() -> None:
    assert 1 <= usable_cores() <= 8
    assert all(quota > 0 for quota in cores.quotas(Path("/")))

"""The control plane's benchmark on real processes, and that clients who leave early leave nothing (case K1)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench import control_plane
from bench.machine import QUIET_NS, Speed
from bench.swarm import Swarm, Tally
from tests.model_factory import tiny_model

ABANDONED = 2000


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[control_plane.Stack]:
    model = str(tiny_model("llama", tmp_path_factory.mktemp("models") / "model"))
    options = control_plane.arguments(["--model", model, "--abandon", str(ABANDONED)])
    with control_plane.stack(options) as running:
        yield running


def test_streams_and_requests_are_measured(stack: control_plane.Stack) -> None:
    row = control_plane.measure(stack, count=6, concurrency=3, output_tokens=20)
    assert row["tokens_per_second"] > 0
    assert row["requests_per_second"] == pytest.approx(row["tokens_per_second"] / 20, rel=0.05)
    assert 1 <= row["tokens_per_step"] <= 3
    assert row["tokens_per_write"] >= 0.9
    assert set(row["cpu_us_per_token"]) == {"api", "tokenizer", "scheduler", "worker"}
    assert all(cost > 1 for cost in row["cpu_us_per_token"].values())
    assert row["scheduler_core_us_per_step"] > 1
    assert row["gap_us_per_step"] > 0
    title, line = control_plane.table([row]).splitlines()
    assert len(title) == len(line)


def test_a_refusal_is_no_stream(stack: control_plane.Stack) -> None:
    with pytest.raises(RuntimeError, match=r"refused.* 404 "):
        Swarm("127.0.0.1", stack.port).run([b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n"], 1)


def test_clients_that_leave_early_leave_nothing_behind(stack: control_plane.Stack) -> None:
    report = control_plane.abandon(stack, ABANDONED)
    early, late = report["after_a_fifth"], report["after_all"]
    assert early["running"] == late["running"] == 0
    for role, count in late["descriptors"].items():
        assert count - early["descriptors"][role] <= 2, (role, report)  # a connection may be closing
    for role, size in late["resident_mib"].items():
        assert size - early["resident_mib"][role] <= 4, (role, report)


def test_costs_are_shared_out() -> None:
    tally = Tally(seconds=2.0, cpu=0.1, requests=10, tokens=1000, reads=500, events=520)
    cpu = {"api": 0.02, "tokenizer": 0.005, "scheduler": 0.01, "worker": 1.0}
    grown = {"pagebus:idle_seconds_total": 0.002, "pagebus:steps_total": 100.0, "pagebus:schedule_seconds_total": 0.005}
    row = control_plane.summary(tally, 32, 100, cpu, grown, loop_ns=2 * QUIET_NS)
    assert row["cpu_us_per_token"]["api"] == 20
    assert (row["control_us_per_token"], row["quiet_us_per_token"]) == (35, 17.5)
    assert (row["control_us_per_request"], row["quiet_us_per_request"]) == (3500, 1750)
    assert (row["tokens_per_step"], row["tokens_per_write"], row["scheduler_core_us_per_step"]) == (10, 2, 50)
    assert (row["tokens_per_second"], row["requests_per_second"], row["client_us_per_token"]) == (500, 5, 100)
    assert (row["ms_per_step"], row["gap_us_per_step"]) == (20, 20)


def test_the_machine_is_timed() -> None:
    with Speed() as speed:
        pass
    assert 1 < speed.ns < 10_000


def test_a_real_worker_runs_one_narrow_layer() -> None:
    with control_plane.stack(control_plane.arguments(["--one-layer"])) as running:
        row = control_plane.measure(running, count=2, concurrency=2, output_tokens=8)
    assert row["tokens_per_second"] > 0

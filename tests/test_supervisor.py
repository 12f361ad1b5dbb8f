"""The supervisor: names the dead, restarts with back-off, leaves no orphan, ends in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagebus.supervisor import LONGEST_BACKOFF, Child, Supervisor, backoff, describe_exit
from shared.errors import EXIT_CONFIG


def child(name: str, code: str, **options: object) -> Child:
    return Child(name, [sys.executable, "-c", textwrap.dedent(code)], **options)  # type: ignore[arg-type]


def run(children: list[Child], on_say: Callable[[Supervisor, str], None] = lambda *_: None, **options: object) -> int:
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        on_say(supervisor, text)

    supervisor = Supervisor(children, say, **options)  # type: ignore[arg-type]
    code = supervisor.run(lambda: 60.0)
    supervisor.said = said  # type: ignore[attr-defined]
    assert not any(c.running for c in children)
    return code


@given(st.integers(0, 10_000))
def test_backoff_grows_to_a_bound(deaths: int) -> None:
    assert 0 <= backoff(deaths) <= backoff(deaths + 1) <= LONGEST_BACKOFF


def test_exit_descriptions() -> None:
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-200) == "killed by signal 200"


def test_a_killed_child_is_named_and_restarted(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    code = f"""
        import os, signal, time
        with open({str(starts)!r}, "a") as f: f.write("x")
        if len(open({str(starts)!r}).read()) < 3: os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
    """
    said: list[str] = []
    assert run([child("worker 0", code)], lambda _, text: said.append(text), ready=True) == 0
    assert len(said) == 2
    assert all("worker 0" in text and "SIGKILL" in text and "restarting" in text for text in said)


def test_a_misconfigured_child_ends_the_run_without_restart() -> None:
    said: list[str] = []
    other = child("other", "import time; time.sleep(60)")
    code = run([other, child("bad", f"raise SystemExit({EXIT_CONFIG})")], lambda _, t: said.append(t), ready=True)
    assert code == EXIT_CONFIG
    assert not said


def test_a_child_that_never_comes_up_ends_the_start() -> None:
    said: list[str] = []
    assert run([child("api 0", "raise SystemExit(1)")], lambda _, text: said.append(text)) == 1
    assert "giving up" in said[-1]
    assert "exit code 1" in said[-1]


def test_children_end_in_order_and_the_stubborn_are_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def logging(name: str, order: int) -> Child:
        code = f"""
            import signal, sys
            def end(*_):
                with open({str(log)!r}, "a") as f: f.write({name!r} + " ")
                sys.exit(0)
            signal.signal(signal.SIGTERM, end)
            with open({str(log)!r} + {name!r}, "w") as f: f.write("up")
            signal.pause()
        """
        return child(name, code, stop_order=order)

    stubborn = child(
        "stubborn",
        f"""
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while not all(os.path.exists({str(log)!r} + n) for n in ("first", "second")): time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGINT)
        signal.pause()
        """,
        stop_order=1,
        grace=0.3,
    )
    assert run([logging("second", 1), stubborn, logging("first", 0)]) == 0
    assert log.read_text() == "first second "


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_no_child_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    program = """
import sys
from pagebus.supervisor import Child, Supervisor
code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
Supervisor([Child("c", [sys.executable, "-c", code])], print).run(lambda: 60.0)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        descriptor = os.pidfd_open(pid)
        launcher.send_signal(signal.SIGKILL)
        import select

        assert select.select([descriptor], [], [], 30)[0], "the child is still there"
        os.close(descriptor)

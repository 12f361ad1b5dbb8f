"""The `pagebus` command: help, version, and one line for a wrong word."""

from __future__ import annotations

import pytest

from pagebus.cli import COMMANDS, main
from shared.errors import EXIT_CONFIG
from shared.version import VERSION


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(words)
    out, err = capsys.readouterr()
    return stop.value.code, out, err


@pytest.mark.parametrize("words", [(), ("--help",), ("help",)])
def test_help_names_every_command(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert all(command in out for command in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[:2] == (0, f"pagebus {VERSION}\n")


@pytest.mark.parametrize(("word", "hint"), [("sevre", "did you mean serve?"), ("xyzzy", "pagebus --help")])
def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str], word: str, hint: str) -> None:
    code, out, err = run(capsys, word)
    assert (code, out, err.count("\n")) == (EXIT_CONFIG, "", 1)
    assert word in err
    assert hint in err


def test_help_of_serve_has_all_groups(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "serve", "--help")
    assert code == 0
    for group in ("Model:", "Execution:", "KV cache:", "Scheduling:", "Processes:", "API:"):
        assert group in out

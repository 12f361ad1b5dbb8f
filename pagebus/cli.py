"""The `pagebus` command: picks the subcommand; each lives in a module of its own."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

from shared.errors import EXIT_CONFIG
from shared.version import VERSION

USAGE = """usage: pagebus COMMAND [...]

  serve [MODEL]   serve a model behind the OpenAI REST API on this machine
  chat            talk to a running server from the terminal
  version         print the version

`pagebus COMMAND --help` explains a command's flags.
"""
COMMANDS = ("serve", "chat", "version")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a subcommand and exits with its code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words else "--help"
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        sys.exit(0)
    if command in ("version", "--version", "-V"):
        print(f"pagebus {VERSION}")
        sys.exit(0)
    if command == "serve":
        from pagebus.serve import run as serve

        sys.exit(serve(words[1:]))
    if command == "chat":
        from pagebus.chat import run as chat

        sys.exit(chat(words[1:]))
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else "see pagebus --help"
    print(f"pagebus: unknown command {command}; {hint}", file=sys.stderr)
    sys.exit(EXIT_CONFIG)

"""The import rules: a service imports itself and `shared`; `shared` imports neither services nor `pagebus`.

Also: nothing unpickles what crosses a process border, and the processes that run without torch never import it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = ("pagebus", "services", "shared")
WITHOUT_TORCH = ("pagebus", "shared", "services/api", "services/tokenizer", "services/scheduler")
UNPICKLERS = {"send_pyobj", "recv_pyobj"}


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def allowed(place: str, name: str) -> bool:
    """Whether the package at `place` ("services/api", "shared", "pagebus") may import `name`."""
    parts = name.split(".")
    if parts[0] == "torch" or (parts[0] == "pickle"):
        return parts[0] == "torch" and place not in WITHOUT_TORCH
    if parts[0] not in OURS or parts[0] == "shared":
        return True
    if parts[0] == "services":
        return place == "/".join(parts[:2])
    return place == "pagebus"


def violations(root: Path) -> Iterator[str]:
    for path in sorted(file for package in OURS for file in (root / package).rglob("*.py")):
        relative = path.relative_to(root)
        place = "/".join(relative.parts[:2]) if relative.parts[0] == "services" else relative.parts[0]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, name in imports(tree):
            if not allowed(place, name):
                yield f"{relative}:{line}: {place} must not import {name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in UNPICKLERS:
                yield f"{relative}:{node.lineno}: {node.attr} unpickles what another process sent"


if __name__ == "__main__":
    found = list(violations(ROOT))
    print("\n".join(found) or "import rules hold")
    sys.exit(bool(found))

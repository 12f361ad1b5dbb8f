"""The section "Modules" of docs/architecture.md: a sentence per module, out of its own docstring.

`python tools/list_modules.py` rewrites the section; with `--check` it only says whether it is up to date.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
MARK = "<!-- made by tools/list_modules.py -->\n"
FOLDERS = {
    "pagebus": "the command and the launcher",
    "services/api": "the HTTP gateway",
    "services/tokenizer": "text to ids and back",
    "services/scheduler": "blocks, prefix cache, plans",
    "services/worker": "the model",
    "csrc/cpu": "the native backend",
    "shared": "what the processes have in common",
}


def sentence(path: Path) -> str:
    """The first paragraph of a Python docstring, or the first comment of a C++ file, as one line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        found = ast.get_docstring(ast.parse(text)) or ""
        return " ".join(found.split("\n\n")[0].split())
    comment = re.match(r"(?://[^\n]*\n)+", text)
    lines = [line[2:].strip() for line in comment[0].splitlines()] if comment else []
    return " ".join(lines[: lines.index("")] if "" in lines else lines)


def section() -> str:
    """The whole section, markers included."""
    parts = [MARK]
    for folder, purpose in FOLDERS.items():
        parts.append(f"\n### {folder}: {purpose}\n")
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".h", ".cpp") and (words := sentence(path)):
                parts.append(f"- `{path.relative_to(ROOT / folder)}`: {words}")
    return "\n".join(parts) + "\n"


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    fresh = page.split(MARK)[0] + section()
    if "--check" in sys.argv:
        print("docs/architecture.md " + ("is up to date" if fresh == page else "is stale: run tools/list_modules.py"))
        return fresh != page
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

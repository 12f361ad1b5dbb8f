"""Renders a chat template that came with a request, in a process of its own with little time and memory.

Jinja's sandbox keeps a template from reaching the interpreter, but not from looping for hours or filling the memory.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import Any

MAX_CPU_SECONDS = 2
MAX_WALL_SECONDS = 20.0
MAX_MEMORY = 1 << 30  # bytes of address space
MAX_RENDERED = 8 << 20  # characters
INHERITED = ("PATH", "LD_LIBRARY_PATH", "TZ")  # the rest of the environment, with its keys, stays here

TOO_MUCH = f"chat_template takes more than {MAX_CPU_SECONDS} s or {MAX_MEMORY >> 20} MiB to render."


class TemplateFailure(Exception):
    """The template failed; the text is its own message, or says which limit it hit."""


def render_untrusted(template: str, variables: dict[str, Any]) -> str:
    """The rendered text. Raises TemplateFailure. `variables` must be plain JSON data."""
    request = json.dumps([template, variables]).encode()
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "services.tokenizer.sandbox"],
            input=request,
            capture_output=True,
            env=environment,
            timeout=MAX_WALL_SECONDS,
            check=False,
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else {"error": TOO_MUCH}
    except (subprocess.TimeoutExpired, ValueError):
        raise TemplateFailure(TOO_MUCH) from None
    if "error" in answer:
        raise TemplateFailure(answer["error"])
    return str(answer["text"])


def _render(template: str, variables: dict[str, Any]) -> dict[str, str]:
    from services.tokenizer.templates import environment

    try:
        text = environment().from_string(template).render(**variables)
    except MemoryError:
        return {"error": TOO_MUCH}
    except Exception as error:
        return {"error": f"{error}"[:1000] or type(error).__name__}
    if len(text) > MAX_RENDERED:
        return {"error": f"chat_template renders {len(text)} characters, more than {MAX_RENDERED}."}
    return {"text": text}


def main() -> int:
    """Reads `[template, variables]` from stdin, writes `{"text"}` or `{"error"}` to stdout, all JSON."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    template, variables = json.load(sys.stdin)
    sys.stdout.write(json.dumps(_render(template, variables)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

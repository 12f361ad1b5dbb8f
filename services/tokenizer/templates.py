"""The Jinja environment in which chat templates are written: transformers' own, without importing transformers.

Sandboxed and immutable, with `raise_exception`, `strftime_now`, `tojson` without HTML escapes, loop controls, and the
`generation` block (https://huggingface.co/docs/transformers/chat_templating_writing).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it is only a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class GuardedNamespace(Namespace):
    """`namespace()` without access to names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:
        """The first of `args` is self: `namespace(self=...)` is a legal call."""
        for name in dict(*args[1:], **values):
            _check_name(name)
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: its name begins with an underscore")


class GuardedDict:
    """`dict(...)` and `dict.fromkeys(...)`, and nothing else of the class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=1)
def environment() -> ImmutableSandboxedEnvironment:
    """The environment, made once."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=GuardedDict(),
        namespace=GuardedNamespace,
    )
    return made


def loops_over_content(template: str) -> bool:
    """Whether the template takes a message's content as a list of parts, not only as a string."""
    parsed = environment().parse(template)
    names = {
        node.target.name
        for node in parsed.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node)
    }
    return any(
        _is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in names)
        for loop in parsed.find_all(nodes.For)
    )


def _is_content(node: nodes.Node | None) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"

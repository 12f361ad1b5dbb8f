"""Flags from structs: every field becomes `--field-name`, `PAGEBUS_FIELD_NAME` and a key of the `--config` YAML file.

The command line wins over the environment, the environment over the file, the file over the default. A boolean `x` has
`--x` and `--no-x`; a list takes several words. Values are checked by msgspec against the field's annotation, wherever
they come from.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from shared.errors import EXIT_CONFIG, StartupError

ENV_PREFIX = "PAGEBUS_"
Config = TypeVar("Config", bound=msgspec.Struct)


def option(group: str, text: str, *, hidden: bool = False, **limits: Any) -> msgspec.Meta:
    """A field's help text and group, and msgspec's limits (`ge`, `le`, ...) on its value."""
    return msgspec.Meta(description=text, extra={"group": group, "hidden": hidden}, **limits)


class Flag(msgspec.Struct):
    """One field of a struct, as a flag."""

    field: str
    owner: type[msgspec.Struct]
    annotation: Any
    default: Any
    help: str = ""
    group: str = "Options"
    hidden: bool = False

    @property
    def name(self) -> str:
        return "--" + self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.field.upper()

    @property
    def is_bool(self) -> bool:
        return self.annotation is bool

    @property
    def is_list(self) -> bool:
        return get_origin(self.annotation) is list

    def convert(self, value: Any, source: str) -> Any:
        """The field's value. Raises StartupError, naming where the value came from."""
        if self.is_list and isinstance(value, str):
            value = value.split()
        try:
            return msgspec.convert({self.field: value}, _one_field(self), strict=False)
        except msgspec.ValidationError as error:
            detail = str(error).split(" - at ")[0]
            raise StartupError(f"{source}: {value!r} is not a valid value: {detail}") from None


def _one_field(flag: Flag) -> Any:
    return dict[str, get_type_hints(flag.owner, include_extras=True)[flag.field]]  # type: ignore[misc]


def _plain(annotation: Any) -> tuple[Any, list[msgspec.Meta]]:
    """An annotation without Annotated and None, and the metadata found on the way."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metas = get_args(annotation)
        plain, more = _plain(inner)
        return plain, [m for m in metas if isinstance(m, msgspec.Meta)] + more
    arms = [arm for arm in get_args(annotation) if arm is not type(None)]
    if origin is not None and len(arms) == 1 and origin is not list:
        return _plain(arms[0]) if origin is Union or type(None) in get_args(annotation) else (annotation, [])
    return annotation, []


def flags_of(struct: type[msgspec.Struct]) -> list[Flag]:
    """The flags of a struct, in the order of its fields."""
    hints = get_type_hints(struct, include_extras=True)
    flags = []
    for field in msgspec.structs.fields(struct):
        annotation, metas = _plain(hints[field.name])
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        flag = Flag(field.name, struct, annotation, default)
        for meta in metas:
            extra = meta.extra or {}
            flag.help = meta.description or flag.help
            flag.group = extra.get("group", flag.group)
            flag.hidden = extra.get("hidden", flag.hidden)
        flags.append(flag)
    return flags


class _Formatter(argparse.HelpFormatter):
    """Wide help with the flags' explanations in one column."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=120)


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors, the nearest name for an unknown flag, and `EXIT_CONFIG`."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)

    def refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        word = next((w for w in words if w.startswith("-")), words[0])
        name = word.split("=")[0]
        known = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        self.error(f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else "; see --help"))


def make_parser(
    prog: str, structs: Iterable[type[msgspec.Struct]], description: str = "", positional: str = ""
) -> _Parser:
    """A parser with a group of flags per group named in the structs' fields."""
    parser = _Parser(prog=prog, description=description, allow_abbrev=False, formatter_class=_Formatter)
    if positional:
        parser.add_argument(positional, nargs="?", default=None, help=f"same as --{positional}")
    groups: dict[str, Any] = {}
    parser.add_argument("--config", metavar="FILE", help="YAML file with flags as keys (max_model_len: 4096)")
    for flag in (flag for struct in structs for flag in flags_of(struct)):
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        _add(groups[flag.group], flag)
    return parser


def _add(group: Any, flag: Flag) -> None:
    options: dict[str, Any] = {"dest": "flag_" + flag.field, "default": None, "help": _help_text(flag)}
    if flag.is_bool:
        options["action"] = argparse.BooleanOptionalAction
    elif flag.is_list:
        options |= {"nargs": "+", "action": "extend", "metavar": _metavar(flag)}
    else:
        options["metavar"] = _metavar(flag)
    group.add_argument(flag.name, **options)


def _help_text(flag: Flag) -> str:
    if flag.hidden:
        return argparse.SUPPRESS
    text = flag.help.replace("%", "%%")
    shown = flag.default not in ("", None, [], 0) and "default" not in text
    return f"{text} (default {flag.default})" if shown else text


def _metavar(flag: Flag) -> str:
    choices = get_args(flag.annotation) if not flag.is_list else ()
    if choices and all(isinstance(choice, str) for choice in choices):
        return "{" + ",".join(choices) + "}"
    return {int: "N", float: "X", str: "TEXT"}.get(flag.annotation, "TEXT")


def parse(
    structs: Sequence[type[msgspec.Struct]],
    argv: Sequence[str],
    *,
    prog: str,
    env: Mapping[str, str] | None = None,
    description: str = "",
    positional: str = "",
) -> list[Any]:
    """One instance of each struct from the command line, the environment and the `--config` file.

    A wrong flag or value prints one line and exits with `EXIT_CONFIG`.
    """
    parser = make_parser(prog, structs, description, positional)
    known, unknown = parser.parse_known_args(list(argv))
    if unknown:
        parser.refuse_unknown(unknown)
    try:
        return _collect(structs, vars(known), os.environ if env is None else env, positional)
    except StartupError as error:
        parser.error(str(error))


def to_argv(config: msgspec.Struct) -> list[str]:
    """The command line that `parse` turns back into `config`; fields at their default are left out."""
    words = []
    for flag in flags_of(type(config)):
        value = getattr(config, flag.field)
        if value == flag.default:
            continue
        if flag.is_bool:
            words.append(flag.name if value else "--no-" + flag.name[2:])
        elif flag.is_list:
            words += [flag.name, *map(str, value)]
        else:
            words.append(f"{flag.name}={value}")
    return words


def _collect(
    structs: Sequence[type[msgspec.Struct]], given: dict[str, Any], env: Mapping[str, str], positional: str
) -> list[Any]:
    flags = {flag.field: flag for struct in structs for flag in flags_of(struct)}
    path = given["config"] or env.get(ENV_PREFIX + "CONFIG")
    values: dict[str, Any] = {}
    for key, value in _read_file(path, flags).items():
        values |= flags[key].convert(value, f"{path}: {key}")
    for flag in flags.values():
        if env.get(flag.variable):  # compose files pass on unset variables as empty ones
            values |= flag.convert(env[flag.variable], flag.variable)
        if (word := given["flag_" + flag.field]) is not None:
            values |= flag.convert(word, flag.name)
    if positional and given[positional] is not None:
        values |= flags[positional].convert(given[positional], positional)
    return [
        struct(**{field: values[field] for field in struct.__struct_fields__ if field in values}) for struct in structs
    ]


def _read_file(path: str | None, flags: Mapping[str, Flag]) -> dict[str, Any]:
    """The keys of a YAML file, with - or _ in their names. Raises StartupError."""
    if not path:
        return {}
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise StartupError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"--config {path}: not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict):
        raise StartupError(f"--config {path}: expected keys and values, such as 'max_model_len: 4096'")
    found = {}
    for key, value in content.items():
        field = str(key).replace("-", "_")
        if field not in flags:
            near = difflib.get_close_matches(field, flags, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise StartupError(f"--config {path}: unknown key {key!r}{hint}")
        found[field] = value
    return found

"""Shows settings on a command line: their help, and what is wrong with them."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_origin

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource

S = TypeVar("S", bound=BaseSettings)


class SettingsError(Exception):
    """Settings do not fit together. The message says how to mend it."""


class HelpFormatter(argparse.HelpFormatter):
    """Descriptions say what happens without a value, so `(default: None)` would only confuse."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=100)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return (action.help or "").replace(" (default: None)", "")


def parse_settings(settings: type[S], program: str, args: list[str] | None) -> S:
    """Returns settings from flags and environment. Prints help or what is wrong, then exits.

    `args` None stands for the process's own.
    """
    args = sys.argv[1:] if args is None else args
    if wrong := unknown_flag(args, flags_of(settings)):
        print(f"{program}: {wrong} (--help lists all)", file=sys.stderr)
        raise SystemExit(2)
    source: Any = CliSettingsSource(
        settings,
        cli_prog_name=program,
        cli_parse_args=repeat_flags(args, list_flags_of(settings)),
        formatter_class=HelpFormatter,
    )
    try:
        return settings(_cli_settings_source=source)
    except ValidationError as error:
        prefix = str(settings.model_config["env_prefix"])
        print(_describe_errors(program, prefix, error), file=sys.stderr)
        raise SystemExit(2) from None


def flags_of(settings: type[BaseSettings]) -> set[str]:
    """Returns all flags, with both of a switch."""
    flags = {"--help"}
    for name in settings.model_fields:
        kebab = name.replace("_", "-")
        flags |= {f"--{kebab}", f"--no-{kebab}"}
    return flags


def list_flags_of(settings: type[BaseSettings]) -> set[str]:
    """Returns the flags that take several values."""
    fields = settings.model_fields.items()
    return {
        f"--{name.replace('_', '-')}"
        for name, field in fields
        if get_origin(field.annotation) is tuple
    }


def repeat_flags(args: Sequence[str], list_flags: Collection[str]) -> list[str]:
    """Returns `args` with the flag of a list before each of its values: peers take them one behind
    the other, `--lora-modules a=/a b=/b`."""
    found: list[str] = []
    flag = ""
    is_first = False
    for arg in args:
        if arg.startswith("-"):
            flag, is_first = (arg if arg in list_flags else ""), True
        elif flag:
            found += [] if is_first else [flag]
            is_first = False
        found.append(arg)
    return found


def unknown_flag(args: Sequence[str], flags: Collection[str]) -> str:
    """Says which flag of `args` is not one of `flags`, and which is the nearest; empty where all
    are."""
    for arg in args:
        flag = arg.split("=", 1)[0]
        if flag[:2] != "--" or flag in flags:
            continue
        near = difflib.get_close_matches(flag, sorted(flags), n=1)
        return f"there is no {flag}" + (f"; did you mean {near[0]}?" if near else "")
    return ""


def _describe_errors(program: str, env_prefix: str, error: ValidationError) -> str:
    """Returns one line for each wrong setting."""
    lines = [f"{program}: wrong settings (see --help)"]
    for fault in error.errors():
        message = fault["msg"].removeprefix("Value error, ")
        for name in map(str, fault["loc"][:1]):
            message = f"--{name.replace('_', '-')} (or {env_prefix}{name.upper()}): {message}"
        lines.append(f"  {message}")
    return "\n".join(lines)


def check_output(file: Path) -> None:
    """Looks at where a command will write, before it computes for minutes. Raises `OSError`, whose
    message says what to do.
    """
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder: name a file in it")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {file.parent} for {file.name}: make it first")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise PermissionError(
            f"{file} may not be written by this process's user ({os.getuid()}): give it the "
            "folder, or name another"
        )

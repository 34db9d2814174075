"""How settings look on a command line: their help, and what is wrong with them."""

from __future__ import annotations

import argparse

from pydantic import ValidationError


class HelpFormatter(argparse.HelpFormatter):
    """Descriptions say what happens without a value, so `(default: None)` would only confuse."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=100)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return (action.help or "").replace(" (default: None)", "")


def describe_errors(program: str, error: ValidationError) -> str:
    """One line for each wrong setting."""
    lines = [f"{program}: wrong settings (see --help)"]
    for fault in error.errors():
        name = str(fault["loc"][0]) if fault["loc"] else ""
        flag, variable = "--" + name.replace("_", "-"), f"TANDEM_{name.upper()}"
        lines.append(f"  {flag} (or {variable}): {fault['msg']}")
    return "\n".join(lines)

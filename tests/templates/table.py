"""Writes the table of published chat templates by what the probe found into README.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode_node.chat_templates.forms import TemplateForms
from decode_node.chat_templates.probe import ARGUMENTS, PARAMETERS, TOOL_NAME, Probe
from decode_node.parsers.output_parsers import OutputParsers, WrittenCall
from decode_node.protocol.chat.tools import Tool

BEGIN, END = "<!-- begin of templates -->\n", "<!-- end of templates -->\n"
USUAL = TemplateForms(reasoning="reasoning_content").to_dict()
HIDDEN = ("shows_tools", "shows_calls", "takes_results", "text_joint", "takes_broken_arguments")


@dataclass(frozen=True)
class Row:
    """One template. `calls` is the parser of its calls, or why there is none."""

    name: str
    calls: str
    forms: Mapping[str, Any]


class _NoTokens:
    added_token_ids: Mapping[str, int] = {}


def row(name: str, source: str, found: Probe) -> Row:
    """Returns the row of one template."""
    written = WrittenCall(found.written_call, Tool(TOOL_NAME, PARAMETERS, False, {}), ARGUMENTS)
    parsers = OutputParsers.of_model(_NoTokens(), source, written=written)
    calls = f"`{parsers.tool_call_parser}`" if parsers.tool_call_parser else "writes none"
    return Row(name, "not read" if parsers.is_unread else calls, found.forms.to_dict())


def _forms(row: Row) -> str:
    """Returns what a template wants besides what most do."""
    differing = [
        (key, value)
        for key, value in row.forms.items()
        if key not in HIDDEN and value != USUAL[key] and (key, value) != ("reasoning", "")
    ]
    return ", ".join(f"{key} {_value(value)}" for key, value in differing) or "the usual"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return " and ".join(value) if isinstance(value, list | tuple) else str(value)


def table(rows: Sequence[Row]) -> str:
    """Returns the table; templates that are alike share a line."""
    alike: dict[tuple[str, str], list[str]] = {}
    for one in rows:
        alike.setdefault((one.calls, _forms(one)), []).append(one.name)
    lines = ["| calls | wants | templates |", "|---|---|---|"]
    for (calls, forms), names in sorted(alike.items()):
        lines.append(f"| {calls} | {forms} | {', '.join(sorted(names))} |")
    return "\n".join(lines) + "\n"


def write(page: Path, rows: Sequence[Row], *, is_check: bool) -> bool:
    """Puts the table into the page; with `is_check` says only whether it is there."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    whole = before + begin + table(rows) + end + after
    if is_check:
        return page.read_text(encoding="utf-8") == whole
    page.write_text(whole, encoding="utf-8")
    return True

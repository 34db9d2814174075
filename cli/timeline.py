"""Draws one request's way through the cluster, as bars over time."""

from __future__ import annotations

from typing import Any

from rich.table import Table

_BAR_WIDTH = 40


def timeline_table(timeline: dict[str, Any]) -> Table:
    """Rows in the order in which things happened; times in ms since decode had the request."""
    total = max(float(timeline["total_s"]), 1e-9)
    table = Table(title=_title(timeline), title_justify="left", show_header=True)
    table.add_column("event")
    table.add_column("ms", justify="right")
    table.add_column("when")
    for name, start_s, end_s in _spans(timeline):
        table.add_row(
            name, f"{(end_s - start_s) * 1e3 or end_s * 1e3:.1f}", _bar(start_s, end_s, total)
        )
    return table


def _spans(timeline: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Returns (label, start, end); marks are spans from their own time to itself."""
    first = timeline["first_token_s"]
    prefill_start = max(0.0, first - timeline["prefill_s"])
    queue_start = max(0.0, prefill_start - timeline["queue_s"])
    spans = [
        ("queue", queue_start, prefill_start),
        ("prefill", prefill_start, first),
    ]
    if timeline.get("kv_bytes"):
        spans.append(
            ("KV first to last byte", timeline["kv_first_byte_s"], timeline["kv_last_byte_s"])
        )
    spans.append(("first token at", first, first))
    if timeline.get("second_token_s") is not None:
        spans.append(("second token at", timeline["second_token_s"], timeline["second_token_s"]))
    spans.append(("last token at", timeline["total_s"], timeline["total_s"]))
    return spans


def _bar(start_s: float, end_s: float, total_s: float) -> str:
    start = min(int(start_s / total_s * _BAR_WIDTH), _BAR_WIDTH - 1)
    stop = min(max(int(end_s / total_s * _BAR_WIDTH), start + 1), _BAR_WIDTH)
    mark = "◆" if end_s == start_s else "█"
    return " " * start + mark * (stop - start)


def _title(timeline: dict[str, Any]) -> str:
    parts = [f"{timeline['path']} prefill", f"{timeline['cached_tokens']} cached tokens"]
    if timeline.get("kv_bytes"):
        streams = _count(timeline["kv_streams"], "stream")
        parts.append(f"{timeline['kv_bytes'] / 1024:.0f} KiB of KV over {streams}")
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

"""Writes explanations for people."""

from __future__ import annotations

from collections.abc import Sequence

from engine.explain.explanation import Explanation, KernelChoice


def report(explanations: Sequence[Explanation]) -> str:
    """Returns all choices, a table for the layers that choose alike."""
    lines: list[str] = []
    for found in explanations:
        lines.append(found.step)
        lines.append(f"  attention backend  {found.backend}")
        lines.append(f"  CUDA graph         {found.graph}")
        if found.thresholds:
            lines.append(f"  thresholds         {found.thresholds}")
        for layers, rows in found.choices:
            lines.append(f"  {_name_of(layers, found)}")
            lines += [f"    {line}" for line in _table(rows)]
        lines.append("")
    return "\n".join(lines)


def summary(explanations: Sequence[Explanation]) -> list[str]:
    """Returns a line for each step: the backend, the graph, and each part's kernel, as most layers
    choose it."""
    lines = []
    for found in explanations:
        _, rows = max(found.choices, key=lambda one: len(one[0]))
        kernels = ", ".join(f"{row.part} {row.kernel}" for row in rows)
        lines.append(f"{found.step}: {found.backend}; graph {found.graph}; {kernels}")
    return lines


def tables_of(explanations: Sequence[Explanation]) -> list[str]:
    """Returns the folders whose tables of tunings were asked, each once."""
    asked = [found.thresholds for found in explanations]
    for found in explanations:
        asked += [table for _, rows in found.choices for row in rows for table in row.tables]
    return sorted({table.partition("/")[0] for table in asked if table})


def _name_of(layers: tuple[int, ...], found: Explanation) -> str:
    if found.names.keys() >= set(layers):
        return ", ".join(found.names[layer] for layer in layers)
    count = len({layer for other, _ in found.choices for layer in other} - found.names.keys())
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    if len(ranges) > 4:
        named = ", ".join(map(str, layers[:4])) + ", ..."
    else:
        named = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in ranges)
    return f"layers {named} ({len(layers)} of {count})"


def _table(rows: Sequence[KernelChoice]) -> list[str]:
    cells = [
        (row.part, row.kernel, row.tile, "; ".join(filter(None, (row.why, *row.tables))))
        for row in rows
    ]
    widths = [max((len(line[i]) for line in cells), default=0) for i in range(3)]
    lines = []
    for part, kernel, tile, why in cells:
        padded = (text.ljust(n) for text, n in zip((part, kernel, tile), widths, strict=True))
        lines.append("  ".join([*padded, why]).rstrip())
    return lines

"""Tables of `bench.serving.pd`."""

from __future__ import annotations

import itertools
import statistics

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.serving.pd_client import STAGES
from bench.serving.report import Figures

_KNEE = 2.0


def knee(result: Figures) -> float | None:
    """Returns the highest rate before TTFT's median is `_KNEE` times that of the lowest rate. None:
    it never is.
    """
    rows = [row for row in result["loads"] if row["ttft_ms"]]
    for row, following in itertools.pairwise(rows):
        if following["ttft_ms"]["p50"] > _KNEE * rows[0]["ttft_ms"]["p50"]:
            return float(row["qps"])
    return None


def print_tables(results: list[Figures], console: Console) -> None:
    loads = Table(title="ms at the client: mean/p50/p99", box=SIMPLE)
    for heading in ("setup", "QPS", "done", "errors", "TTFT", "ITL", "tok/s"):
        loads.add_column(heading, no_wrap=True)
    for result in results:
        for row in result["loads"]:
            loads.add_row(
                result["name"], row["load"], str(row["done"]), str(row["num_errors"]),
                _three(row["ttft_ms"]), _three(row["itl_ms"]), f"{row['out_tok_per_s'] or 0:.0f}",
            )  # fmt: skip
    console.print(loads)
    for result in results:
        if result["loads"]:
            rate = knee(result)
            console.print(
                f"{result['name']}: TTFT's knee "
                + (f"behind {rate:g} requests per second" if rate else "was not reached")
            )
    _print_stages([result for result in results if "stages" in result], console)
    for result in results:
        if ratio := result.get("interference", {}).get("p99 ratio"):
            console.print(f"{result['name']}: ITL p99 beside transfers / alone: {ratio:.2f}")
        host_us = result.get("interference", {}).get("host us per step", {})
        if all(host_us.values()) and host_us:
            alone, beside = host_us["alone"], host_us["beside transfers"]
            console.print(
                f"{result['name']}: host time of a decode step alone {alone:.0f} us, beside "
                f"transfers {beside:.0f} us: {beside / alone:.2f}"
            )


def _print_stages(results: list[Figures], console: Console) -> None:
    if not results:
        return
    table = Table(title="one request at a time, median ms", box=SIMPLE)
    table.add_column("stage")
    for result in results:
        table.add_column(result["name"], justify="right")
    for name in STAGES:
        found = [result["stages"][name] for result in results]
        table.add_row(name, *(f"{one['p50']:.1f}" if one else "" for one in found))
    sizes = [statistics.median(result["stages"]["kv_bytes"]) / 1e6 for result in results]
    table.add_row("KV, MB", *(f"{size:.1f}" for size in sizes))
    console.print(table)


def _three(figures: Figures | None) -> str:
    return "" if figures is None else "/".join(f"{figures[q]:.1f}" for q in ("mean", "p50", "p99"))

"""Tables and plots of `bench.serving.pd`."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

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


def plot_rates(results: list[Figures], path: Path) -> None:
    """Plots TTFT and ITL against the rate, a line for each setup."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    for axis, (key, label) in zip(
        figure.subplots(1, 2), (("ttft_ms", "TTFT, ms"), ("itl_ms", "ITL, ms")), strict=True
    ):
        for number, result in enumerate(results):
            rows = [row for row in result["loads"] if row[key]]
            rates = [row["qps"] for row in rows]
            for quantile, style in (("p50", "o-"), ("p99", "s--")):
                axis.plot(
                    rates, [row[key][quantile] for row in rows], style, color=f"C{number % 10}",
                    label=f"{result['name']} {quantile}",
                )  # fmt: skip
        axis.set(xlabel="requests per second", ylabel=label, ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=130)


def plot_points(results: list[Figures], label: str, path: Path) -> None:
    """Plots the same, and the stages of one request, against what is swept, a line for each
    rate.
    """
    from matplotlib.figure import Figure

    names = [str(result["point"]) for result in results]
    places = range(len(results))
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    ttft, itl, stages = figure.subplots(1, 3)
    rates = [row["qps"] for row in results[0]["loads"]]
    for axis, key, quantile in ((ttft, "ttft_ms", "p50"), (itl, "itl_ms", "p99")):
        for number, rate in enumerate(rates):
            rows = [result["loads"][number][key] for result in results]
            values = [row[quantile] if row else None for row in rows]
            axis.plot(places, values, "o-", label=f"{rate:g} per second")
        axis.set(ylabel=f"{key[:4].strip('_').upper()} {quantile}, ms", ylim=(0, None))
    for name in ("first token", "last KV byte injected", "second token"):
        found = [result.get("stages", {}).get(name) for result in results]
        stages.plot(places, [one["p50"] if one else None for one in found], "o-", label=name)
    stages.set(ylabel="one request at a time, ms", ylim=(0, None))
    for axis in (ttft, itl, stages):
        axis.set_xticks(places, labels=names)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=130)

"""Draws tandem beside its alternatives on two GPUs, from result files alone.

    python -m bench.serving.comparison

It reads `pd_serving.json` (prefill and decode on a GPU each, and one node on one GPU) and
`vllm-0.26.0-serving.json` (vLLM with prefill and decode apart, and two replicas of vLLM), and
writes `comparison.png`: the median time to the first token, and the 99th percentile of the time
between two tokens, both against the rate of requests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.record import RESULTS

LINES = (
    # (result file, its engine, label, style)
    ("pd_serving.json", "tandem-1p1d", "tandem, prefill | decode", "C0o-"),
    ("vllm-0.26.0-serving.json", "vllm-pd", "vLLM, prefill | decode (NIXL)", "C1s--"),
    ("vllm-0.26.0-serving.json", "vllm-rep2", "vLLM, two replicas", "C2^--"),
    ("pd_serving.json", "tandem-0p1d", "tandem, one node on one GPU", "C7v:"),
)
PANELS = (
    ("ttft_ms", "p50", "time to first token, p50, ms", None),
    ("itl_ms", "p99", "time between tokens, p99, ms (log)", "log"),
)
RATES = (1.0, 4.0, 8.0, 16.0)


def loads_of(results: Path, file: str, engine: str) -> list[dict[str, Any]]:
    """Returns one row for each of `RATES`. Raises `KeyError` for one that is not there."""
    loads = json.loads((results / file).read_text(encoding="utf-8"))["figures"]["loads"]
    by_rate = {row["qps"]: row for row in loads if row["engine"] == engine}
    return [by_rate[rate] for rate in RATES]


def draw(results: Path, path: Path) -> None:
    """Writes the picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots(1, len(PANELS))
    for axis, (key, quantile, label, scale) in zip(axes, PANELS, strict=True):
        for file, engine, name, style in LINES:
            values = [row[key][quantile] for row in loads_of(results, file, engine)]
            axis.plot(RATES, values, style, label=name)
        axis.set(xlabel="requests per second, 2000 tokens in, 150 out", ylabel=label)
        axis.set_xticks(RATES)
        axis.grid(alpha=0.3, which="both")
        if scale:
            axis.set_yscale(scale)
            ticks = (5, 10, 20, 50, 100)
            axis.set_yticks(ticks, labels=[str(tick) for tick in ticks])
        else:
            axis.set_ylim(0, None)
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle("Llama-3.1-8B shape in bf16 on NVIDIA H200: lower is better", fontsize=10)
    figure.savefig(path, dpi=130)


def main() -> None:
    draw(RESULTS, RESULTS / "comparison.png")


if __name__ == "__main__":
    main()

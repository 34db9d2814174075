"""Other ways to compute a step, tried beside the present one on the same device and weights.

    python -m bench.engine.step_variants                    # prefill, then decode
    python -m bench.engine.step_variants --parts prefill
    python -m bench.engine.step_variants --parts fp8-cache --quantization fp8   # its decodes
    python -m bench.engine.step_variants --dry-run    # a tiny model on the CPU: does everything run

The model runs in this process, without engine and sampling. A decode step is timed as one CUDA
graph: requests with 1088 tokens of context whose blocks are scattered over a cache that fills
most of the memory. A variant must give the logits of the present way but for rounding, and the
same bits each time.
Writes bench/results/step_variants.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from bench.engine.models.shapes import QUANTIZATIONS
from bench.engine.variants.catalogue import (
    DECODE_CASES,
    Variant,
    applied,
    decode_variants,
    fp8_decode_variants,
    prefill_variants,
    small_m_variants,
    whole_steps,
)
from bench.engine.variants.checks import attention_error, largest_error
from bench.engine.variants.model import VariantModel
from bench.record import write_result
from engine.layers.attention.paged import PagedBackend
from tandem_kernels.attention.attention_metadata import AttentionMetadata

_LARGEST_LOGITS_ERROR, _LARGEST_KERNEL_ERROR = 0.1, 1e-2
_ROUNDS, _REPLAYS = 5, 8
_SMALL_M_ROWS = 16
_FLOORS_MS = {1: 3.52, 16: 4.0, 64: 5.6, 256: 14.1}
_MUST_MS = {1: 4.8, 16: 5.4, 64: 7.5, 256: 17.5}
_BUSY_MS = {1: 0.04, 16: 0.04, 64: 0.06, 256: 0.1}
"""The microseconds that sampling and bookkeeping add to a step of the engine, about."""
_TUNED_PROMPTS = ((2048,) * 4, (1024,) * 8)
_PROMPTS = ((8192,), (2048,) * 4, (1024,) * 8, (1536, 512, 4096, 2048), (2048,) * 8)


def step_ms(model: VariantModel, step: Callable[[], Tensor]) -> tuple[float, Tensor, bool]:
    """Returns the median time, what the step gives, and whether it always gives the same bits."""
    if model.device.type == "cpu":
        started = time.perf_counter()
        found = step()
        return 1e3 * (time.perf_counter() - started), found.float(), torch.equal(found, step())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    graph.replay()
    first, same, times = found.clone(), True, []
    for _ in range(_ROUNDS):
        times.append(_timed_ms(lambda: [graph.replay() for _ in range(_REPLAYS)]) / _REPLAYS)
        same = same and torch.equal(found, first)
    return sorted(times)[len(times) // 2], first, same


def eager_ms(model: VariantModel, step: Callable[[], Tensor]) -> tuple[float, Tensor, bool]:
    """Returns the same for a step whose launches cost little."""
    if model.device.type == "cpu":
        return step_ms(model, step)
    first, same, times = step(), True, []
    outputs: list[Tensor] = []
    for _ in range(4):
        times.append(_timed_ms(lambda: outputs.append(step())))
        same = same and torch.equal(outputs.pop(), first)
    return sorted(times)[1], first, same


def _timed_ms(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


Timer = Callable[[VariantModel, Callable[[], Tensor]], tuple[float, Tensor, bool]]


class Trial:
    """Times variants of one step; the first is what the others must equal."""

    def __init__(
        self,
        model: VariantModel,
        case: str,
        timer: Timer,
        metadata: AttentionMetadata | None = None,
        error: Callable[[VariantModel, AttentionMetadata], float] = largest_error,
    ) -> None:
        """Builds the timer; `metadata` is of decodes, whose kernels are to be checked one
        by one: `error` says how.
        """
        self._model, self._case, self._timer, self._metadata = model, case, timer, metadata
        self._error = error
        self.rows: list[dict[str, object]] = []
        self._expected: Tensor | None = None

    def measure(self, variant: Variant, step: Callable[[], Tensor]) -> float:
        """Milliseconds; infinite when the variant fails or is wrong."""
        row: dict[str, object] = {"case": self._case, "variant": variant.name}
        self.rows.append(row)
        try:
            with applied(variant, self._model.model, self._model.gemms):
                ms, found, same = self._timer(self._model, step)
                kernels = 0.0
                if self._metadata is not None:
                    kernels = self._error(self._model, self._metadata)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            return self._report(row, float("inf"))
        if self._expected is None:
            self._expected = found
        error = ((found - self._expected).norm() / self._expected.norm()).item()
        row |= {"ms": round(ms, 4), "logits": float(f"{error:.1e}"), "same bits": same}
        row["kernels"] = float(f"{kernels:.1e}")
        row["right"] = same and error < _LARGEST_LOGITS_ERROR and kernels < _LARGEST_KERNEL_ERROR
        return self._report(row, ms if row["right"] else float("inf"))

    def _report(self, row: dict[str, object], ms: float) -> float:
        print(" | ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        return ms


def try_decode(model: VariantModel) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for batch, context in DECODE_CASES:
        metadata = model.decode_metadata(batch, context)
        trial = Trial(model, f"decode {batch} x {context}", step_ms, metadata)
        step = model.decode_step(metadata)
        small_m = small_m_variants() if batch <= _SMALL_M_ROWS else []
        for variant in (Variant("present"), *decode_variants(), *small_m, *whole_steps()):
            trial.measure(variant, step)
        rows += trial.rows
    return rows


def try_fp8_cache(model: VariantModel) -> list[dict[str, object]]:
    """Tries decode attention alone, over an FP8 cache."""
    rows: list[dict[str, object]] = []
    for batch, context in DECODE_CASES:
        metadata = model.decode_metadata(batch, context)
        step, present = model.decode_step(metadata), Variant("present")
        trial = Trial(model, f"decode {batch} x {context}", step_ms, metadata, attention_error)
        for variant in (present, *fp8_decode_variants(), replace(present, name="present again")):
            trial.measure(variant, step)
        rows += trial.rows
    return rows


def try_prefill(model: VariantModel) -> list[dict[str, object]]:
    rows = []
    for lengths in _PROMPTS:
        lengths = tuple(min(length, model.longest) for length in lengths)
        trial = Trial(model, f"prefill {lengths}", eager_ms)
        for name, backend in model.attention_ways().items():
            trial.measure(Variant(name), model.prefill_step(lengths, backend))
        if lengths in _TUNED_PROMPTS:
            for variant in (*prefill_variants(), Variant("deterministic", deterministic=True)):
                trial.measure(variant, model.prefill_step(lengths, PagedBackend()))
        rows += trial.rows
    return rows


def compile_all(arguments: argparse.Namespace, processes: int) -> None:
    """Fills the cache of compiled kernels by processes that run every variant once."""
    command = [
        sys.executable,
        "-m",
        "bench.engine.step_variants",
        "--shape",
        arguments.shape,
        "--parts",
        arguments.parts,
        "--compile",
    ]
    started = time.perf_counter()
    parts = [subprocess.Popen([*command, f"{i}/{processes}"]) for i in range(processes)]
    codes = [part.wait() for part in parts]
    print(f"compiled in {time.perf_counter() - started:.0f} s {codes}", flush=True)


def compile_part(arguments: argparse.Namespace) -> None:
    index, count = map(int, arguments.compile.split("/"))
    is_fp8 = arguments.parts == "fp8-cache"
    model = VariantModel(
        arguments.shape,
        num_layers=1,
        most_bytes=1 << 30,
        kv_cache_dtype="fp8" if is_fp8 else "auto",
    )
    sizes = (16, 32, 64, 256)
    variants = fp8_decode_variants() if is_fp8 else decode_variants()
    work = [(batch, variant) for batch in sizes for variant in variants]
    if not is_fp8:
        work += [(16, variant) for variant in (*small_m_variants(), *whole_steps())]
        work += [(0, variant) for variant in prefill_variants()]
    for batch, variant in work[index::count]:
        step = model.prefill_step((2048, 1024), PagedBackend())
        if batch:
            step = model.decode_step(model.decode_metadata(batch, 1088))
        try:
            with torch.inference_mode(), applied(variant, model.model, model.gemms):
                step()
        except Exception as error:
            print(variant.name, type(error).__name__, str(error)[:100], flush=True)


def print_table(rows: list[dict[str, object]]) -> None:
    """Prints the fastest right variants of each case."""
    for case in dict.fromkeys(str(row["case"]) for row in rows):
        good = [row for row in rows if row["case"] == case and row.get("right")]
        print(f"\n{case}: {len(good)} right variants")
        words = case.split()
        batch = int(words[1]) if words[0] == "decode" and words[-1] == "1088" else 0
        for row in sorted(good, key=_ms)[:7] + good[:1]:
            line = f"  {_ms(row):9.3f} ms  {_ms(good[0]) / _ms(row):6.3f} x present"
            if batch in _FLOORS_MS:
                line += f"  floor {_FLOORS_MS[batch] / _ms(row):5.2f}"
                line += f"  must {_MUST_MS[batch] / (_ms(row) + _BUSY_MS[batch]):5.3f}"
            print(f"{line}  logits {row['logits']}  {row['variant']}")
    for row in rows:
        if not row.get("right"):
            print("failed or wrong:", row)


def _ms(row: dict[str, object]) -> float:
    return float(str(row["ms"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--parts", default="prefill,decode", help="comma separated")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="", help="of the weights")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--compiled", action="store_true", help="the cache of kernels is filled")
    parser.add_argument("--only-compile", action="store_true", help="fill the cache of kernels")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile:
        compile_part(arguments)
        return
    if not arguments.dry_run and not arguments.compiled and arguments.parts != "prefill":
        compile_all(arguments, min(12, os.cpu_count() or 1))
    if arguments.only_compile:
        return
    started = time.perf_counter()
    parts = arguments.parts.split(",")
    if "fp8-cache" in parts and len(parts) > 1:
        parser.error("fp8-cache is a part for itself: the others have a cache in bf16")
    model = VariantModel(
        arguments.shape,
        tiny=arguments.dry_run,
        quantization=arguments.quantization,
        kv_cache_dtype="fp8" if "fp8-cache" in parts else "auto",
    )
    print(f"{model.num_blocks} blocks, ready in {time.perf_counter() - started:.0f} s", flush=True)
    tries = {"decode": try_decode, "prefill": try_prefill, "fp8-cache": try_fp8_cache}
    rows: list[dict[str, object]] = []
    for part in parts:
        with torch.inference_mode():
            rows += tries[part](model)
        if not arguments.dry_run:
            figures = {"shape": arguments.shape, "rows": rows}
            print(write_result("step_variants", figures), flush=True)
    print_table(rows)


if __name__ == "__main__":
    main()

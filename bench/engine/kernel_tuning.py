"""Sweep the attention kernels' tunings on this device and print the fastest of each shape.

    python -m bench.engine.kernel_tuning decode|prefill [--kv-cache-dtype fp8]

`decode_tuning` and `prefill_tuning` in tandem_kernels hold what this found.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from bench.engine.timing.device_time import graph_us
from bench.engine.timing.kernel_cases import SCALE, PagedInputs, attention_flops, paged_inputs
from tandem_kernels.attention.decode_attention import decode_attention
from tandem_kernels.attention.decode_tuning import DecodeTuning
from tandem_kernels.attention.kv_scales import E4M3
from tandem_kernels.attention.prefill_attention import prefill_attention
from tandem_kernels.attention.prefill_tuning import PrefillTuning

Attention = Callable[..., None]
Lengths = dict[str, tuple[list[int], list[int]]]
Tuning = DecodeTuning | PrefillTuning


DECODE_SHAPES = [
    *((b, 1024) for b in (1, 4, 16, 32, 64, 128, 256)),
    *((b, 8192) for b in (1, 16, 64)),
]
PREFILL_SHAPES = [(2048, 2048), (8192, 8192), (10240, 2048)]


def decode_tunings(kv_dtype: torch.dtype) -> Iterable[DecodeTuning]:
    for tile, warps, stages, programs in itertools.product(
        (32, 64, 128), (2, 4), (3, 5, 7), (1, 2, 3, 4, 6)
    ):
        in_flight = tile * 256 * kv_dtype.itemsize * ((stages - 1) // 2)
        if in_flight * programs <= 200 * 1024 and in_flight * programs >= 32 * 1024:
            yield DecodeTuning(tile, warps, stages, programs)


def prefill_tunings() -> Iterable[PrefillTuning]:
    for rows, tile, warps, stages in itertools.product(
        (64, 128), (32, 64, 128), (4, 8), (3, 5, 6, 7)
    ):
        yield PrefillTuning(rows, tile, warps, stages)


def attempt(attention: Attention, given: PagedInputs, tuning: Tuning) -> float:
    """Microseconds, or infinity where the tuning does not fit the device."""
    out = torch.empty_like(given.q)
    attend = partial(attention, kv_scales=given.kv_scales)
    calls = [
        partial(attend, given.q, cache, given.metadata, SCALE, out, tuning)
        for cache in given.kv_caches
    ]
    try:
        calls[0]()
        return graph_us(calls, replays=7)
    except OutOfResources:
        return math.inf


def compile_all(arguments: list[str], processes: int) -> None:
    """Fill the compile cache by processes that launch each tuning once."""
    command = [sys.executable, "-m", "bench.engine.kernel_tuning", *arguments, "--part"]
    parts = [subprocess.Popen([*command, f"{i}/{processes}"]) for i in range(processes)]
    assert all(part.wait() == 0 for part in parts)


def compile_part(
    attention: Attention, tunings: list[Tuning], lengths: Lengths, kv_dtype: torch.dtype
) -> None:
    for (seq_lens, query_lens), tuning in itertools.product(lengths.values(), tunings):
        given = paged_inputs(seq_lens, query_lens, most_caches=1, kv_dtype=kv_dtype)
        out = torch.empty_like(given.q)
        attend = partial(attention, kv_scales=given.kv_scales)
        with contextlib.suppress(OutOfResources):
            attend(given.q, given.kv_caches[0], given.metadata, SCALE, out, tuning)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", choices=["decode", "prefill"])
    parser.add_argument("--kv-cache-dtype", choices=["bfloat16", "fp8"], default="bfloat16")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--part", help="i/n: only compile every n-th tuning, from i on")
    arguments = parser.parse_args()
    decode = arguments.kernel == "decode"
    kv_dtype = E4M3 if arguments.kv_cache_dtype == "fp8" else torch.bfloat16
    attention: Attention = decode_attention if decode else prefill_attention
    tunings: list[Tuning] = [*decode_tunings(kv_dtype)] if decode else [*prefill_tunings()]
    lengths: Lengths = {f"{b} x {n}": ([n] * b, [1] * b) for b, n in DECODE_SHAPES}
    if not decode:
        lengths = {f"{q} of {n}": ([n], [q]) for n, q in PREFILL_SHAPES}
    if arguments.part:
        i, n = map(int, arguments.part.split("/"))
        compile_part(attention, tunings[i::n], lengths, kv_dtype)
        return
    same = [arguments.kernel, "--kv-cache-dtype", arguments.kv_cache_dtype]
    compile_all(same, arguments.processes)
    for label, (seq_lens, query_lens) in lengths.items():
        given = paged_inputs(seq_lens, query_lens, kv_dtype=kv_dtype)
        flops = attention_flops(seq_lens, query_lens)
        times = {tuning: attempt(attention, given, tuning) for tuning in tunings}
        print(label, f"{given.kv_bytes / 1e6:.1f} MB, {flops / 1e12:.3f} TFLOP")
        for tuning, us in sorted(times.items(), key=lambda item: item[1])[:8]:
            rates = f"{given.kv_bytes / us / 1e6:.2f} TB/s {flops / us / 1e6:.0f} TFLOP/s"
            print(f"   {us:.2f} us {rates} {tuning}", flush=True)


if __name__ == "__main__":
    main()

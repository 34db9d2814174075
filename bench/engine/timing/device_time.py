"""Time on a CUDA device: replayed graphs, rotating buffers, and the machine's own ceilings."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence

import torch
from torch.multiprocessing import spawn

L2_BYTES = 60 * 2**20
_MOST_COMPILERS = 16


def rotations(bytes_per_call: float, most: int = 32) -> int:
    """Returns how many input sets keep repeated calls from living in the cache."""
    return max(1, min(most, round(8 * L2_BYTES / max(bytes_per_call, 1))))


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Returns the median microseconds of one call when `calls` run back to back inside a CUDA
    graph.
    """
    repeated = list(calls) * max(1, 16 // len(calls))
    return statistics.median(replay_times(repeated, replays + 2, calls)[2:])


def replay_times(
    calls: Sequence[Callable[[], object]],
    replays: int,
    warm_up: Sequence[Callable[[], object]] | None = None,
) -> list[float]:
    """Returns the microseconds of one call in each replay of a CUDA graph of `calls`, from the
    first one on. `warm_up`: those that run before they are recorded; None: all."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls if warm_up is None else warm_up:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for call in calls]
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    del kept
    return times


def eager_us(call: Callable[[], object], repeats: int = 12) -> float:
    """Returns the median microseconds of one long call."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times[2:])


def copy_bytes_per_us() -> float:
    """Measures a device-to-device copy, bytes read plus bytes written."""
    source = torch.empty(2**30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / eager_us(lambda: target.copy_(source))


def matmul_flops_per_us() -> float:
    """Measures a bf16 GEMM, 8192 cubed, with random operands."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * 8192**3 / eager_us(lambda: torch.mm(a, b, out=out))


def compile_all(run_part: Callable[..., object], *given: object) -> None:
    """Fills the compile cache by `run_part(first, count, *given)` in `count` processes, each of
    which launches every `count`-th case of a bench once."""
    count = min(_MOST_COMPILERS, os.cpu_count() or 1)
    spawn(run_part, (count, *given), count)

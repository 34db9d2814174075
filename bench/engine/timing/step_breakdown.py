"""Shows where the time of a step goes: kernels by kind, gaps between them, host.

The worker runs in this process, so that torch's profiler sees its kernels. The profiler slows the
host; host times are taken without it.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch.profiler import ProfilerActivity, profile

from engine.config import EngineConfig
from engine.contracts.scheduler_output import SchedulerOutput
from engine.executor.uniproc_executor import UniprocExecutor
from engine.speed.offline_engine import OfflineEngine, StepResult, offline_engine

_BATCHES = (1, 16, 64, 256)
_PREFILLS = ((1, 128), (1, 2048), (1, 8192), (16, 2048), (4, 8192))
"""Pairs (prompts at once, tokens of each)."""
_PLAIN_STEPS, _PROFILED_STEPS = 30, 8
_MIXED = 256
"""Requests at once."""
_LIBRARY_NAMES = ("gemm", "linear", "nvjet", "cutlass", "xmma", "splitk", "cublas", "gemv")
_GEMM_NAMES = (
    *_LIBRARY_NAMES, "_qkv_kernel", "_gate_up_kernel", "_down_kernel", "small_m", "few_row",
    "one_row_expert", "experts_ahead", "normed_router", "lora_shrink", "lora_expand",
)  # fmt: skip
_ATTENTION_NAMES = (
    "attention", "merge_kernel", "sdpa", "flash::", "latent_decode", "sparse_latent",
    "sparse_ahead", "sparse_pieces", "block_sparse", "window_rows",
)  # fmt: skip
_FIRST_KERNEL, _LAST_KERNEL = "prepare_inputs_kernel", "post_update_kernel"
"""The kernels that begin and end a step; each step has one of both."""

CudaEvent = tuple[float, float, str]
"""A kernel as (start, end, name), microseconds."""


@dataclass(slots=True)
class KernelTimes:
    """Sums over `num_steps` steps together. Microseconds. A kernel that starts before the one
    before it has ended counts from that end: launched early, it has only waited.
    """

    num_steps: int
    by_name: Counter[str] = field(default_factory=Counter)
    busy: float = 0.0
    span: float = 0.0
    largest_gaps: list[float] = field(default_factory=list)
    between_steps: list[float] = field(default_factory=list)
    """The time from a step's last kernel to the next one's first, what ran in between not
    counted.
    """
    num_kernels: int = 0

    def per_step(self) -> dict[str, object]:
        kinds: Counter[str] = Counter()
        for name, duration in self.by_name.items():
            kinds[_kind(name)] += duration
        steps = self.num_steps
        return {
            "gpu_ms": round(self.span / steps / 1e3, 3),
            "gemm_ms": round(kinds["gemm"] / steps / 1e3, 3),
            "attention_ms": round(kinds["attention"] / steps / 1e3, 3),
            "other_ms": round(kinds["other"] / steps / 1e3, 3),
            "gaps_ms": round((self.span - self.busy) / steps / 1e3, 3),
            "largest_gap_us": round(statistics.median(self.largest_gaps or [0.0]), 1),
            "between_steps_us": round(statistics.median(self.between_steps or [0.0]), 1),
            "kernels": round(self.num_kernels / steps),
            "top": [
                (name[:60], round(duration / steps, 1))
                for name, duration in self.by_name.most_common(14)
            ],
        }


class TimedExecutor(UniprocExecutor):
    """Measures in `host_us` how long each step took the host to start."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.host_us: list[float] = []

    def execute_model(self, step: SchedulerOutput) -> None:
        started = time.perf_counter()
        super().execute_model(step)
        self.host_us.append(1e6 * (time.perf_counter() - started))


def measure_breakdown(config: EngineConfig) -> dict[str, object]:
    """Profiles the steps of an engine that is as `config` says but for its CUDA graphs, which are
    of the batches that are looked at."""
    device = replace(config.device, cudagraph_capture_sizes=_BATCHES)
    config = replace(config, device=device)
    executor = TimedExecutor(config)
    found: dict[str, object] = {}
    with offline_engine(config, executor) as engine:
        for batch in _BATCHES:
            found[f"decode {batch}"] = _profile_decode(engine, executor, batch)
            _print(f"decode {batch}", found[f"decode {batch}"])
        for count, length in _PREFILLS:
            case = f"prefill {count} x {length}"
            found[case] = _profile_prefill(engine, executor, count, length)
            _print(case, found[case])
        found["mixed"] = _profile_mixed(engine)
        _print("mixed", found["mixed"])
    return found


def _print(case: str, figures: object) -> None:
    assert isinstance(figures, dict)
    print(case, {key: value for key, value in figures.items() if key != "top"})
    for name, duration in figures["top"]:
        print(f"    {duration:10.1f} us  {name}")


class _Window:
    """Profiles some steps that follow the first `first`, which it counts.

    Attributes:
        count: Steps so far.
    """

    def __init__(self, first: int) -> None:
        self.count = 0
        self._first = first
        self._profiler = profile(activities=[ProfilerActivity.CUDA])

    def step(self) -> None:
        self.count += 1
        if self.count in (self._first, self._first + _PROFILED_STEPS):
            torch.cuda.synchronize()
            begins = self.count == self._first
            (self._profiler.start if begins else self._profiler.stop)()

    def figures(self) -> dict[str, object]:
        return kernel_times(cuda_events(self._profiler)).per_step()


def _profile_decode(
    engine: OfflineEngine, executor: TimedExecutor, batch: int
) -> dict[str, object]:
    """Runs steps of a full batch: some without the profiler, then some with it."""
    window = _Window(_PLAIN_STEPS)
    plain_host: list[float] = []
    plain_at: list[float] = []

    def on_step(step: StepResult) -> None:
        if step.num_tokens != batch:
            return
        window.step()
        if window.count == 1:
            executor.host_us.clear()
        elif window.count <= _PLAIN_STEPS:
            plain_at.append(step.at)
        if window.count == _PLAIN_STEPS:
            plain_host.extend(executor.host_us)

    num_prefill_steps = -(-batch * 1024 // 8192)
    engine.run([engine.request(1024, num_prefill_steps + 60) for _ in range(batch)], on_step)
    figures = window.figures()
    figures["step_ms"] = round(1e3 * (plain_at[-1] - plain_at[0]) / max(1, len(plain_at) - 1), 3)
    figures["host_us"] = round(statistics.median(plain_host), 1)
    return figures


def _profile_prefill(
    engine: OfflineEngine, executor: TimedExecutor, count: int, length: int
) -> dict[str, object]:
    """Figures are per step: several prompts take several."""

    def run() -> None:
        engine.run([engine.request(length, 1) for _ in range(count)])

    executor.host_us.clear()
    for _ in range(3):
        run()
    # The last step of a run computes nothing.
    host_us = statistics.median(took for took in executor.host_us if took > 500)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    figures = kernel_times(cuda_events(profiler)).per_step()
    figures["host_us"] = round(host_us, 1)
    return figures


def _profile_mixed(engine: OfflineEngine) -> dict[str, object]:
    """Runs many requests at once without the profiler, and again with it for steps in the middle of
    their prompts, in which those that came first decode. `steps_ms`: of all steps that brought
    tokens, as the host saw them without it."""
    steps = engine.run([engine.request(2000, 150) for _ in range(_MIXED)])
    window = _Window(_PLAIN_STEPS)
    engine.run([engine.request(2000, 150) for _ in range(_MIXED)], lambda step: window.step())
    gaps = [round(1e3 * (after.at - before.at), 1) for before, after in pairwise(steps)]
    return {**window.figures(), "steps_ms": gaps}


def cuda_events(profiler: profile) -> list[CudaEvent]:
    """Returns the kernels and copies that a profiler has seen, in order."""
    return sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA
    )


def kernel_times(events: list[CudaEvent]) -> KernelTimes:
    """Sums up `events`: kernels and copies, in order."""
    times = KernelTimes(num_steps=max(1, sum(name == _LAST_KERNEL for _, _, name in events)))
    if not events:
        return times
    end, largest = events[0][0], 0.0
    idle: float | None = None
    for start, stop, name in events:
        gap = max(0.0, start - end)
        largest = max(largest, gap)
        if idle is not None:
            idle += gap
        if name == _FIRST_KERNEL and idle is not None:
            times.between_steps.append(idle)
            idle = None
        alone = max(0.0, stop - max(start, end))
        times.by_name[name] += alone
        times.busy += alone
        end = max(end, stop)
        if name == _LAST_KERNEL:
            times.largest_gaps.append(largest)
            largest = idle = 0.0
    times.span = end - events[0][0]
    times.num_kernels = len(events)
    return times


def _kind(name: str) -> str:
    lowered = name.lower()
    if any(word in lowered for word in _ATTENTION_NAMES):
        return "attention"
    if any(word in lowered for word in _GEMM_NAMES):
        return "gemm"
    return "other"

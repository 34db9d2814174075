#!/usr/bin/env python3
"""Other tiles of few rows' kernels, each inside whole decode steps of one engine.

    python -m bench.engine.step_tunings                          # one row of gpt-oss-120b
    python -m bench.engine.step_tunings --batch 2 --kernels qkv,down

Steps do not follow the times of kernels alone: what counts is also how a kernel's programs lie on
the SMs beside those of its neighbours. So each candidate is put in the place of the engine's own
choice, the graphs are recorded again, which takes a second or two, and steps are timed. The
engine's own choice comes first and last, because a GPU gets warmer. Candidates that gain belong
into `few_row_tuning`, `decode_tuning` and the tables of experts. Routing is uniform.
Writes bench/results/step-tunings-gpt-oss-120b-BATCH.json.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from bench.engine.models.shapes import shape_config
from bench.engine.models.uniform_routing import uniform_routing
from bench.engine.timing.expert_formats import Mxfp4Weights
from bench.name_lists import names_among
from bench.record import write_result
from engine.executor.uniproc_executor import UniprocExecutor
from engine.speed.measurements import decode_steps
from engine.speed.offline_engine import OfflineEngine, offline_engine
from tandem_kernels.attention import decode_attention
from tandem_kernels.attention.decode_tuning import DecodeTuning
from tandem_kernels.experts import expert_tuning
from tandem_kernels.experts.expert_tuning import ExpertShape, ExpertTuning
from tandem_kernels.gemm import few_row_gemm, few_row_qkv
from tandem_kernels.gemm.few_row_gemm import FewRowTuning

_CONTEXT, _STEPS, _TURNS = 1024, 96, 2
_OUTPUTS = {"qkv": 5120, "o": 2880}
"""Outputs of gpt-oss' layers, by which they are told apart."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One tuning of one kernel; `enabled` puts it in place meanwhile."""

    kernel: str
    tuning: FewRowTuning | ExpertTuning | DecodeTuning

    @contextmanager
    def enabled(self) -> Iterator[None]:
        modules: tuple[ModuleType, ...]
        if isinstance(self.tuning, FewRowTuning):
            modules, name = (few_row_gemm, few_row_qkv), "few_row_tuning"
        elif isinstance(self.tuning, ExpertTuning):
            modules, name = (expert_tuning,), "expert_tuning"
        else:
            modules, name = (decode_attention,), "decode_tuning"
        own = getattr(modules[0], name)
        for module in modules:
            setattr(module, name, self._choice(own))
        try:
            yield
        finally:
            for module in modules:
                setattr(module, name, own)

    def _choice(self, own: Callable[..., object]) -> Callable[..., object]:
        """Returns a function that chooses as `own` does, but for this kernel."""
        if self.kernel == "attention":
            return lambda *args: self.tuning
        if self.kernel in _OUTPUTS:
            outputs = _OUTPUTS[self.kernel]
            return lambda rows, count: self.tuning if count == outputs else own(rows, count)

        def experts(shape: ExpertShape, num_pairs: int, gpu: str, *, gated: bool) -> object:
            if gated == (self.kernel == "gate-up"):
                return self.tuning
            return own(shape, num_pairs, gpu, gated=gated)

        return experts


def few_rows(kernel: str, num_rows: int) -> Iterator[Candidate]:
    """Yields tiles whose threads have whole vectors, and few enough of them for registers."""
    for cols, depth, warps in itertools.product((2, 4, 8, 16), (512, 1024, 2048, 4096), (1, 2, 4)):
        vectors = depth // (8 * 32 * warps)
        if vectors > 0 and cols * vectors * num_rows <= 16:
            yield Candidate(kernel, FewRowTuning(cols, depth, warps))


def experts(kernel: str, num_rows: int) -> Iterator[Candidate]:
    """Yields the tiles of pairs by themselves that the sweep of kernels alone has."""
    for tuning in Mxfp4Weights.tunings(num_rows / 32):
        if tuning.each_pair:
            yield Candidate(kernel, tuning)


def attention(kernel: str, num_rows: int) -> Iterator[Candidate]:
    sizes = (32, 64, 128), (2, 4, 8), (2, 3, 5), (1, 2)
    for tile, warps, stages, programs in itertools.product(*sizes):
        yield Candidate(kernel, DecodeTuning(tile, warps, stages, programs))


KERNELS: dict[str, Callable[[str, int], Iterator[Candidate]]] = {
    "qkv": few_rows,
    "o": few_rows,
    "gate-up": experts,
    "down": experts,
    "attention": attention,
}


class Steps:
    """Times steps of a batch, whose graphs are recorded anew each time."""

    def __init__(self, engine: OfflineEngine, executor: UniprocExecutor, batch: int) -> None:
        self.engine, self.runner, self.batch = engine, executor._worker.runner, batch

    def step_ms(self) -> float:
        """Returns the least mean of some turns. Kernels are compiled in steps without graphs."""
        self.runner.drop_graphs()
        self.engine.run([self.engine.request(100, 4) for _ in range(self.batch)])
        self.runner.capture_model(lambda fraction: None)
        size = self.batch, _CONTEXT, _STEPS, 8192
        return min(1e3 * decode_steps(self.engine, *size).mean_s for _ in range(_TURNS))

    def all_of(self, candidates: list[Candidate]) -> list[dict[str, object]]:
        """Times all candidates, and the engine's own choice before and after them."""
        found = [self._timed("own", "own", self.step_ms())]
        for candidate in candidates:
            with candidate.enabled():
                try:
                    ms = self.step_ms()
                except Exception as error:  # A tile may exceed registers or shared memory.
                    print(f"failed  {candidate.kernel} {candidate.tuning}: {error}", flush=True)
                    continue
            found.append(self._timed(candidate.kernel, repr(candidate.tuning), ms))
        found.append(self._timed("own", "own, again", self.step_ms()))
        return found

    def _timed(self, kernel: str, tuning: str, ms: float) -> dict[str, object]:
        print(f"{ms:.3f} ms  {kernel} {tuning}", flush=True)
        return {"kernel": kernel, "tuning": tuning, "step_ms": round(ms, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1, help="rows of a step, at most four")
    parser.add_argument(
        "--kernels", type=names_among(KERNELS), default=list(KERNELS), help="comma separated"
    )
    given = parser.parse_args()
    config = shape_config(
        "gpt-oss-120b",
        capture_sizes=(given.batch,),
        max_model_len=4096,
        disabled_fast_paths=("prompt-graphs",),
    )
    candidates = [
        candidate for name in given.kernels for candidate in KERNELS[name](name, given.batch)
    ]
    executor = UniprocExecutor(config)
    with (
        uniform_routing(config.scheduler.max_num_batched_tokens),
        offline_engine(config, executor) as engine,
    ):
        figures = Steps(engine, executor, given.batch).all_of(candidates)
    print(write_result(f"step-tunings-gpt-oss-120b-{given.batch}", {"steps": figures}))


if __name__ == "__main__":
    main()

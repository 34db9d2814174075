#!/usr/bin/env python3
"""Looks for cliffs: cases drawn from wide ranges, each between two neighbours.

A case is a decode step (1 to 256 rows, contexts of 16 to 64k tokens, equal or mixed) or prompts (50
to 20,000 tokens, alone or several, some behind a prefix). Its neighbours have 0.8 and 1.25 times as
many tokens. Where it takes over 1.15 times what a straight line between them says, or that line
over 1.15 times what it takes, there is a cliff.

    python -m bench.engine.sweep --seed 1                        # all engines, 60 cases
    python -m bench.engine.sweep --engines 8b,8b-fp8 --cases 90  # ten of each
    python -m bench.engine.sweep --layers 8                      # of each model: starts sooner
    python -m bench.engine.sweep --engines 8b --name sweep-8b    # a part, in a file of its own

Weights are random, experts are chosen uniformly, contexts are not computed (`timing.bare_steps`).
Results: bench/results/NAME.json.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.arguments import names_among, parser_of
from bench.engine.models.shapes import shape_config
from bench.engine.timing.bare_steps import BareSteps, bare_steps
from bench.record import write_result
from engine.config import EngineConfig, KVCacheDtype

_SMALLER, _LARGER = 0.8, 1.25
_CLIFF = 1.15
_MAX_MODEL_LEN = 72_000
BUDGET = 8192
"""Tokens of a step."""
_MOST_TOKENS = 400_000
"""Limits the contexts of a batch: more of them fit on no card of 80 GB."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and how its weights and cache are kept."""

    shape: str
    quantization: str = ""
    kv_cache_dtype: KVCacheDtype = "auto"

    def config(
        self, max_model_len: int, max_num_seqs: int = 256, num_layers: int | None = None
    ) -> EngineConfig:
        """Returns its engine. `num_layers`: None for all."""
        return shape_config(
            self.shape,
            num_layers=num_layers,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=BUDGET,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
        )


ENGINES: dict[str, Subject] = {
    "8b": Subject("llama-3.1-8b"),
    "8b-fp8": Subject("llama-3.1-8b", "fp8", "fp8"),
    "8b-int4": Subject("llama-3.1-8b", "int4"),
    "8b-nvfp4": Subject("llama-3.1-8b", "nvfp4"),
    "30b-a3b": Subject("qwen3-30b-a3b"),
    "30b-a3b-fp8": Subject("qwen3-30b-a3b", "fp8"),
    "gpt-oss-20b": Subject("gpt-oss-20b"),
    "v2-lite": Subject("deepseek-v2-lite"),
    "35b-a3b": Subject("qwen3.5-35b-a3b"),
    "nemotron-3-nano": Subject("nemotron-3-nano"),
    "v3.2": Subject("deepseek-v3.2-6-layers"),
    "v4-flash": Subject("deepseek-v4-flash-3-layers"),
    "minimax-m3": Subject("minimax-m3-4-layers"),
    "mimo-v2": Subject("mimo-v2-flash-7-layers"),
    "gemma-4": Subject("gemma-4-26b-a4b"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """Says what is timed.

    Attributes:
        kind: `decode`: a step behind `lengths`. `prompts`: of `lengths`, `before` tokens cached.
        lengths: One a request.
    """

    kind: str
    lengths: tuple[int, ...]
    before: int = 0

    def scaled(self, factor: float) -> Case:
        return Case(
            self.kind, tuple(max(1, round(length * factor)) for length in self.lengths), self.before
        )

    @property
    def name(self) -> str:
        span = f"{min(self.lengths)}-{max(self.lengths)}" if self.is_mixed else self.lengths[0]
        behind = f" behind {self.before}" if self.before else ""
        return f"{self.kind} {len(self.lengths)} x {span}{behind}"

    @property
    def is_mixed(self) -> bool:
        return len(set(self.lengths)) > 1

    def seconds(self, steps: BareSteps) -> float:
        if self.kind == "decode":
            return steps.decode_s(self.lengths)
        return steps.prompts_s([(length, self.before) for length in self.lengths])


@dataclass(frozen=True, slots=True)
class Figure:
    """A case between its neighbours. `ratio`: its time over the line between theirs."""

    engine: str
    case: str
    ms: float
    smaller_ms: float
    larger_ms: float
    ratio: float

    @property
    def is_cliff(self) -> bool:
        return not 1 / _CLIFF <= self.ratio <= _CLIFF


def draw(chance: random.Random, count: int) -> list[Case]:
    """Returns cases, every other one a decode step."""
    return [_decode(chance) if index % 2 else _prompts(chance) for index in range(count)]


def _log_uniform(chance: random.Random, low: float, high: float) -> int:
    return round(low * (high / low) ** chance.random())


def _decode(chance: random.Random) -> Case:
    batch = _log_uniform(chance, 1, 256)
    longest = min(65_536, _MOST_TOKENS // batch)
    if chance.random() < 0.3:
        return Case("decode", tuple(_log_uniform(chance, 16, longest) for _ in range(batch)))
    return Case("decode", (_log_uniform(chance, 16, longest),) * batch)


def _prompts(chance: random.Random) -> Case:
    count = 1 if chance.random() < 0.5 else _log_uniform(chance, 2, 16)
    longest = 20_000 // (1 if count < 4 else 4)
    before = _log_uniform(chance, 64, 40_000) if chance.random() < 0.3 else 0
    if chance.random() < 0.3:
        return Case("prompts", tuple(_log_uniform(chance, 50, longest) for _ in range(count)))
    return Case("prompts", (_log_uniform(chance, 50, longest),) * count, before)


def measure(name: str, cases: Sequence[Case], num_layers: int | None) -> list[Figure]:
    """Starts an engine and times its cases; those for which it has no room are left out."""
    config = ENGINES[name].config(_MAX_MODEL_LEN, num_layers=num_layers)
    figures = []
    started = time.perf_counter()
    with bare_steps(config) as steps:
        print(f"{name}: started in {time.perf_counter() - started:.0f} s", flush=True)
        for case in cases:
            trio = case.scaled(_SMALLER), case, case.scaled(_LARGER)
            if not steps.fits([length + case.before for length in trio[2].lengths]):
                print(f"{name}: {case.name} does not fit", flush=True)
                continue
            figures.append(compare(name, case, [one.seconds(steps) for one in trio]))
            mark = "  CLIFF" if figures[-1].is_cliff else ""
            print(
                f"{name}: {case.name}: {figures[-1].ms} ms, {figures[-1].ratio}{mark}", flush=True
            )
    return figures


def compare(engine: str, case: Case, seconds: Sequence[float]) -> Figure:
    """Sets a case's seconds, the middle ones, beside the line between the outer ones."""
    smaller, own, larger = (1e3 * one for one in seconds)
    share = (1 - _SMALLER) / (_LARGER - _SMALLER)
    expected = smaller + share * (larger - smaller)
    rounded = (round(one, 3) for one in (own, smaller, larger))
    return Figure(engine, case.name, *rounded, ratio=round(own / expected, 3))


def main() -> None:
    parser = parser_of(__doc__, "sweep")
    parser.add_argument("--engines", type=names_among(ENGINES), default=list(ENGINES))
    parser.add_argument(
        "--cases", type=int, default=60, help="of all engines there are, as many of each"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, help="of each model; default: all that it has")
    arguments = parser.parse_args()
    each = -(-arguments.cases // len(ENGINES))
    figures: list[Figure] = []
    for name in arguments.engines:
        chance = random.Random(f"{arguments.seed} {name}")
        figures += measure(name, draw(chance, each), arguments.layers)
        found = [asdict(one) for one in figures]
        path = write_result(arguments.name, {"layers": arguments.layers, "cases": found})
    cliffs = [one for one in figures if one.is_cliff]
    print(f"{len(figures)} cases, {len(cliffs)} cliffs; {path}")
    for one in cliffs:
        print(f"{one.engine}: {one.case}: {one.smaller_ms} {one.ms} {one.larger_ms} ms")


if __name__ == "__main__":
    main()

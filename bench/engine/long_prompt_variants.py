#!/usr/bin/env python3
"""Other ways to compute a step with thousands of prompt tokens, in turns.

    python -m bench.engine.long_prompt_variants
    python -m bench.engine.long_prompt_variants --dry-run    # a tiny model on the CPU

A GPU that is busy for long is limited by its power, so what comes first is faster and differences
of one percent drown in the order. Here every variant has many short turns, one after another, and
its median counts. A variant must give the logits of the first but for rounding.
Writes bench/results/long_prompt_variants.json.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.engine.step_variants import step_ms
from bench.engine.variants.catalogue import Variant, applied, long_prompt_variants, prefill_variants
from bench.engine.variants.model import VariantModel
from bench.record import write_result

_LARGEST_LOGITS_ERROR = 0.1
_STEPS = 2
"""The steps of one turn."""
_CASES = {
    "8192": ((8192,), 0),
    "4 x 2048": ((2048,) * 4, 0),
    "4 x 2112": ((2112,) * 4, 0),
    "4 x 2048 behind 8192": ((2048,) * 4, 8192),
    "8192 behind 8192": ((8192,), 8192),
    "1024 behind 8192": ((1024,), 8192),
    "896": ((896,), 0),
    "768": ((768,), 0),
    "640": ((640,), 0),
    "8 x 1024": ((1024,) * 8, 0),
    "2 x 8192": ((8192, 8192), 0),
}
"""Prompts, and how much of each is in the cache."""


@dataclass(slots=True)
class Candidate:
    """One variant to be timed; `turns` are milliseconds."""

    variant: Variant
    step: Callable[[], Tensor]
    turns: list[float] = field(default_factory=list)
    error: float = 0.0
    failed: str = ""


def candidates(model: VariantModel, case: str, parts: set[str]) -> list[Candidate]:
    """Returns the candidates; the last is the first again."""
    lengths, num_cached = _CASES[case]
    lengths = tuple(min(length, model.longest) for length in lengths)
    ways = model.attention_ways()
    chosen = ways.pop("present")
    present = model.prefill_step(lengths, chosen, num_cached)
    own = model.prefill_step(lengths, ways.pop("triton"), num_cached)
    first, *others = long_prompt_variants()
    found = [Candidate(first, present)]
    if "steps" in parts:
        found += [Candidate(variant, present) for variant in others]
        kept = model.prefill_step(lengths, chosen, num_cached, keeps_rows=True)
        found.append(Candidate(Variant("last layer of sampled rows"), kept))
    if "attention" in parts:
        found.append(Candidate(Variant("triton"), own))
        if num_cached == 0:
            found += [
                Candidate(Variant(name), model.prefill_step(lengths, backend))
                for name, backend in ways.items()
            ]
        found += [Candidate(variant, own) for variant in prefill_variants()]
    return [*found, Candidate(Variant("present, again"), present)]


def turn_ms(model: VariantModel, step: Callable[[], Tensor]) -> tuple[float, Tensor]:
    if model.device.type == "cpu":
        ms, logits, _ = step_ms(model, step)
        return ms, logits
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_STEPS):
        logits = step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / _STEPS, logits


def take_turns(model: VariantModel, found: list[Candidate], rounds: int) -> None:
    """Takes turns; the first round prepares and checks."""
    expected: Tensor | None = None
    for turn in range(rounds + 1):
        for candidate in found:
            if candidate.failed:
                continue
            try:
                with applied(candidate.variant, model.model, model.gemms):
                    ms, logits = turn_ms(model, candidate.step)
            except Exception as error:
                candidate.failed = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
                continue
            if turn > 0:
                candidate.turns.append(ms)
            expected = logits if expected is None else expected
            candidate.error = ((logits - expected).norm() / expected.norm()).item()


def measure(
    model: VariantModel, case: str, parts: set[str], rounds: int
) -> list[dict[str, object]]:
    found = candidates(model, case, parts)
    lengths, _ = _CASES[case]
    take_turns(model, found, rounds)
    first = statistics.median(found[0].turns)
    rows: list[dict[str, object]] = []
    for candidate in found:
        row: dict[str, object] = {"case": case, "variant": candidate.variant.name}
        if candidate.failed:
            row["failed"] = candidate.failed
        else:
            ms = statistics.median(candidate.turns)
            row |= {
                "ms": round(ms, 3),
                "against first": round(first / ms, 4),
                "fastest": round(min(candidate.turns), 3),
                "slowest": round(max(candidate.turns), 3),
                "ktok/s": round(sum(lengths) / ms, 2),
                "logits": float(f"{candidate.error:.1e}"),
                "right": candidate.error < _LARGEST_LOGITS_ERROR,
            }
        print(" | ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--cases", default=",".join(_CASES), help="comma separated")
    parser.add_argument("--parts", default="steps,attention", help="comma separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU")
    arguments = parser.parse_args()
    model = VariantModel(arguments.shape, tiny=arguments.dry_run)
    rows: list[dict[str, object]] = []
    rounds = 1 if arguments.dry_run else arguments.rounds
    for case in arguments.cases.split(","):
        with torch.inference_mode():
            rows += measure(model, case, set(arguments.parts.split(",")), rounds)
    if not arguments.dry_run:
        figures = {"shape": arguments.shape, "rounds": arguments.rounds, "rows": rows}
        print(write_result("long_prompt_variants", figures))


if __name__ == "__main__":
    main()

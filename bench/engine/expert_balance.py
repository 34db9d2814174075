#!/usr/bin/env python3
"""Finds what plans of `--enable-eplb` are worth, without a GPU: how even ranks' loads become where
experts are chosen by a power law, how many experts move, and how long a rank plans.

    python -m bench.engine.expert_balance                       # 256 experts, 8 of them a token
    python -m bench.engine.expert_balance --experts 128 --ranks 2,4,8

Loads of the next window are drawn anew from the same preferences: a plan is judged by them, not by
those that it was made for. Results: bench/results/expert_balance.json.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from bench.record import write_result
from engine.expert_placement import (
    Placement,
    expected_loads,
    initial_placement,
    moves_between,
    plan_placement,
)

NUM_LAYERS = 20
TOKENS = 20_000
"""Pairs of token and expert in a window."""


def preferences(num_experts: int, exponent: float, chance: random.Random) -> list[float]:
    """Returns how likely each expert is: the n-th most likely one by n to the power of
    `-exponent`, in any order."""
    weights = [(place + 1) ** -exponent for place in range(num_experts)]
    chance.shuffle(weights)
    return weights


def window(likely: list[float], chance: random.Random) -> list[int]:
    """Returns the tokens of each expert in a window."""
    loads = [0] * len(likely)
    for expert in chance.choices(range(len(likely)), likely, k=TOKENS):
        loads[expert] += 1
    return loads


def balancedness(placement: Placement, loads: list[int]) -> float:
    of_ranks = expected_loads(placement, loads)
    return statistics.mean(of_ranks) / max(of_ranks)


def measure(
    num_experts: int, num_redundant: int, num_ranks: int, exponent: float
) -> dict[str, float]:
    """Returns means over layers."""
    chance = random.Random(f"{num_experts} {num_ranks} {exponent}")
    before, after, moved, seconds = [], [], [], []
    for _ in range(NUM_LAYERS):
        likely = preferences(num_experts, exponent, chance)
        current = initial_placement(num_experts, num_redundant, num_ranks)
        seen, coming = window(likely, chance), window(likely, chance)
        started = time.perf_counter()
        planned = plan_placement(seen, current)
        seconds.append(time.perf_counter() - started)
        plain = initial_placement(num_experts, 0, num_ranks)
        before.append(balancedness(plain, coming))
        after.append(balancedness(planned, coming))
        moved.append(len(moves_between(current, planned)) / num_ranks)
    return {
        "experts": num_experts,
        "redundant": num_redundant,
        "ranks": num_ranks,
        "exponent": exponent,
        "balancedness_before": round(statistics.mean(before), 3),
        "balancedness_after": round(statistics.mean(after), 3),
        "moved_a_rank": round(statistics.mean(moved), 1),
        "plan_ms_a_layer": round(1e3 * statistics.median(seconds), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--ranks", default="2,4,8", help="comma separated")
    parser.add_argument("--redundant", default="0,16,32,64", help="comma separated")
    parser.add_argument("--exponents", default="0.3,0.6,1.0", help="comma separated")
    arguments = parser.parse_args()
    results = []
    for num_ranks in map(int, arguments.ranks.split(",")):
        for exponent in map(float, arguments.exponents.split(",")):
            for num_redundant in map(int, arguments.redundant.split(",")):
                results.append(measure(arguments.experts, num_redundant, num_ranks, exponent))
                print(results[-1], flush=True)
    print(write_result("expert_balance", results))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Random traffic over drafts that are right with a chosen probability.

    python -m tests.engine.sched.planted_traffic 100000

runs so many moves of schedulers, workers, transfers, clients who abort, and prefix caches that are
reset, with few blocks: every output is right and nothing is left. The tests run the same.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.engine.sched.factories import make_config
from tests.engine.sched.fake_worker import planted_drafter
from tests.engine.sched.step_machine import StepMachine
from tests.engine.sched.test_random_steps import KINDS, Traffic

QUERY_LENS = (2, 4, 8)
ACCEPTANCES = (0.0, 0.5, 0.8, 1.0)


@dataclass
class Totals:
    """Adds up what happened. `counts`: tokens of a row and step."""

    num_moves: int = 0
    num_preemptions: int = 0
    num_aborts: int = 0
    num_resets: int = 0
    counts: Counter[int] = field(default_factory=Counter)


def run_planted(num_moves: int) -> Totals:
    """Runs traffics, each with another number and quality of drafts, until they had `num_moves`."""
    totals = Totals()
    seed = 0
    while totals.num_moves < num_moves:
        _run_one(seed, totals)
        seed += 1
    return totals


def _run_one(seed: int, totals: Totals) -> None:
    rng = random.Random(seed)
    query_len = QUERY_LENS[seed % len(QUERY_LENS)]
    config = make_config(
        decode_query_len=query_len,
        policy=rng.choice(["fcfs", "priority"]),
        max_num_seqs=6,
        max_num_batched_tokens=64,
        max_model_len=64,
    )
    machine = StepMachine(config, rng.choice([18, 24]), depth=rng.choice([1, 2, 2]), seed=seed)
    machine.worker.drafter = planted_drafter(rng, ACCEPTANCES[seed % len(ACCEPTANCES)])
    execute = machine.worker.execute

    def counted(step):  # type: ignore[no-untyped-def]
        output = execute(step)
        totals.counts.update(output.counts)
        return output

    def reset() -> None:
        totals.num_resets += machine.scheduler.reset_prefix_cache()

    machine.worker.execute = counted  # type: ignore[method-assign]
    traffic = Traffic(machine, seed, KINDS[seed % len(KINDS)])
    traffic.moves.append((1, reset))
    traffic.run()
    totals.num_moves += traffic.num_moves
    totals.num_preemptions += machine.scheduler.stats().num_preemptions
    clients = machine.clients.values()
    totals.num_aborts += sum(client.finish_reason == "abort" for client in clients)


def main() -> None:
    started = time.perf_counter()
    totals = run_planted(int(sys.argv[1]))
    print(f"{totals} in {time.perf_counter() - started:.0f} s: nothing is left, every output right")


if __name__ == "__main__":
    main()

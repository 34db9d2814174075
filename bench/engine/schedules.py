#!/usr/bin/env python3
"""Estimates how long many requests at once would take by other schedules, without a GPU.

The engine's scheduler makes the steps, a model of their costs times them: linear layers at the rate
of long steps, attention of prompts at its own, contexts of decodes at the bandwidth that their
kernel reaches, and steps of decodes alone as they were measured. All figures are those of the 8B
shape on one H200 (bench/results/engine-llama-3.1-8b-breakdown.json).

    python -m bench.engine.schedules
    python -m bench.engine.schedules --step-tokens 2048,8192 --requests 64
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from bench.engine.models.shapes import shape_config
from bench.engine.scheduler import Workers
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.outputs import ModelRunnerOutput
from engine.contracts.request import Request
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import SchedulerOutput
from engine.contracts.step_work import ModelCost, StepWork
from engine.models.step_costs import cost_of
from engine.sched.rows.row import Row
from engine.sched.rows.work_meter import WorkMeter
from engine.sched.scheduler import Scheduler
from kv_transfer.no_connector import NoConnectorScheduler

_GEMM_FLOPS, _ATTENTION_FLOPS = 676e12, 443e12
_BYTES_BESIDE_PROMPTS, _BYTES_ALONE = 4.1e12, 4.05e12
_SMALL_S, _GAPS_S = 4.43e-3 / 8192, 1.0e-3
"""Norms, rotation and cache for each token; gaps for each step with prompts."""
_DECODE_ROWS, _DECODE_MS = (1, 16, 64, 128, 256), (4.11, 4.26, 4.68, 5.5, 7.25)
"""All of a step of decodes but attention."""
_DEPTH = 2
_NUM_BLOCKS = 6914


@dataclass(frozen=True, slots=True)
class Assumption:
    """Says what else would hold: a faster GEMM, and the part that is hidden of what decodes read of
    contexts or prompts attend, whichever is less."""

    name: str
    step_tokens: int = 8192
    gemm_rate: float = 1.0
    hidden: float = 0.0


class LastWork(WorkMeter):
    """Keeps the work of the step that went out last in `last`."""

    last: StepWork

    def work_of(
        self,
        chunks: Iterable[tuple[Row, int, int]],
        decodes: Iterable[Row],
        step_id: int,
        query_len: int,
    ) -> StepWork:
        self.last = super().work_of(chunks, decodes, step_id, query_len)
        return self.last


def seconds_of(work: StepWork, cost: ModelCost, assumed: Assumption) -> Counter[str]:
    """Returns the seconds of a step by what takes them."""
    attention = cost.attention[0]
    contexts = work.pairs_of_decodes[0] * attention.kv_bytes
    num_decodes = work.num_rows - work.num_prompt_rows
    if work.num_prompt_rows == 0:
        rest = float(np.interp(num_decodes, _DECODE_ROWS, _DECODE_MS)) / 1e3
        return Counter({"decode steps but contexts": rest, "contexts": contexts / _BYTES_ALONE})
    prompts = work.pairs_of_prompts[0] * attention.flops_of_prompts / _ATTENTION_FLOPS
    beside = contexts / _BYTES_BESIDE_PROMPTS
    return Counter(
        {
            "GEMMs": work.num_tokens * cost.flops_per_token / (_GEMM_FLOPS * assumed.gemm_rate),
            "attention of prompts": prompts,
            "contexts": beside - assumed.hidden * min(prompts, beside),
            "small kernels, gaps": work.num_tokens * _SMALL_S + _GAPS_S,
        }
    )


def simulate(
    assumed: Assumption, requests: int, input_tokens: int, output_tokens: int
) -> tuple[Counter[str], Counter[str]]:
    """Returns seconds by what takes them, and the number of steps by kind."""
    config = shape_config("llama-3.1-8b", max_num_batched_tokens=assumed.step_tokens)
    cost = cost_of(config)
    assert cost is not None
    scheduler, meter = Scheduler(config, _NUM_BLOCKS, NoConnectorScheduler()), LastWork(cost)
    scheduler.measure(meter)
    rng = random.Random(1)
    for index in range(requests):
        sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        tokens = [rng.randrange(100_000) for _ in range(input_tokens)]
        message = EngineCoreRequest(
            request_id=f"{index:032x}",
            spec=RequestSpec(tokens, sampling),
            arrival_time=time.monotonic(),
        )
        scheduler.add_request(Request(message))
    workers, taken, steps = Workers(rng), Counter[str](), Counter[str]()
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        if step is not None:
            taken.update(seconds_of(meter.last, cost, assumed))
            steps[meter.last.kind] += 1
            in_flight.append((step, workers.execute(step)))
        if step is None or len(in_flight) == _DEPTH:
            scheduler.update_from_output(*in_flight.popleft())
    return taken, steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input-tokens", type=int, default=2000)
    parser.add_argument("--output-tokens", type=int, default=150)
    parser.add_argument(
        "--step-tokens",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[8192, 2048, 4096, 16384],
        help="comma separated",
    )
    arguments = parser.parse_args()
    sizes = arguments.requests, arguments.input_tokens, arguments.output_tokens
    for assumed in (
        *(Assumption(f"{tokens} tokens a step", tokens) for tokens in arguments.step_tokens),
        Assumption("8448 tokens a step, whole waves of tiles", 8448, gemm_rate=33 / 32),
        Assumption("GEMMs 2.8 % quicker", gemm_rate=1 / (1 - 0.0276)),
        Assumption("GEMMs at the rate of 46 k tokens a second", gemm_rate=1.035),
        Assumption("decodes attended beside prompts", hidden=1.0),
    ):
        taken, steps = simulate(assumed, *sizes)
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in taken.items())
        print(f"{assumed.name:42} {taken.total():6.2f} s: {parts}; steps: {dict(steps)}")


if __name__ == "__main__":
    main()

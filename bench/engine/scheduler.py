#!/usr/bin/env python3
"""Measures what one step costs the scheduler: microseconds and message bytes at steady decode.

No worker and no model: results are made up as fast as they can be read. Each batch decodes for
some hundred steps, with requests at random distances from their next block, as in service. A step
is `schedule` and `update_from_output`; encoding of the step message is timed apart, because it is
the executor's. Depth 2 is asynchronous scheduling. Every case is measured in several rounds, of
which the one with the lowest median counts: other programs can only make it slower.

    python -m bench.engine.scheduler
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.arguments import parser_of
from bench.figures import percentile
from bench.record import write_result
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.outputs import ModelRunnerOutput
from engine.contracts.request import Request
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import SchedulerOutput
from engine.models.specs.llama import LlamaSpec
from engine.rope import Rotary
from engine.sched.scheduler import Scheduler
from kv_transfer.connectors.no_connector import NoConnectorScheduler

_BATCHES = (32, 128, 256, 512)
_PROMPT_LENGTHS = (64, 512)
_MAX_MODEL_LEN = 4096
_MAX_NUM_BATCHED_TOKENS = 8192
_WARM_UP_STEPS = 100
_ROUNDS = 3


def make_config(batch: int, block_size: int) -> EngineConfig:
    spec = LlamaSpec(
        hidden_size=4096,
        intermediate_size=14_336,
        rms_norm_eps=1e-5,
        rotary=Rotary(theta=500_000.0, dim=128),
        tie_word_embeddings=False,
    )
    model = ModelConfig(
        path="",
        served_model_name="none",
        architecture="LlamaForCausalLM",
        vocab_size=128_256,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_model_len=_MAX_MODEL_LEN,
        eos_token_ids=(128_001, 128_009),
        dtype="bfloat16",
        load_format="dummy",
        model_hash="none",
        spec=msgspec.to_builtins(spec),
    )
    return EngineConfig(
        engine_id="bench",
        epoch=1,
        model=model,
        cache=CacheConfig(block_size=block_size),
        scheduler=SchedulerConfig(
            max_num_seqs=batch, max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS
        ),
    )


class Workers:
    """Answers each step with one token for every row that samples."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rows: dict[int, tuple[int, int]] = {}
        """row -> (epoch, prefill tokens not computed yet)."""
        self._decode: set[int] = set()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for row in step.finished_rows:
            del self._rows[row]
            self._decode.discard(row)
        for new in step.new_reqs:
            left = new.prefill_len - new.num_computed_tokens
            self._rows[new.row] = (new.epoch, left)
        self._decode.update(step.decode_add)
        self._decode.difference_update(step.decode_remove)
        rows = sorted(self._decode)
        for row, count in step.prefill_chunks:
            epoch, left = self._rows[row]
            self._rows[row] = (epoch, left - count)
            if left == count:
                rows.append(row)
        tokens = [self._rng.randrange(100_000) for _ in rows]
        return ModelRunnerOutput(step.step_id, rows, [self._rows[row][0] for row in rows], tokens)


@dataclass(slots=True)
class Samples:
    """One entry for each measured step. Times in microseconds."""

    schedule: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    encode: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


def add_requests(
    scheduler: Scheduler, config: EngineConfig, batch: int, rng: random.Random, aligned: bool
) -> None:
    """Adds requests. `aligned`: equal prompts that all fit in one step, so that all rows need their
    next block in the same step: the largest message.
    """
    for index in range(batch):
        length = _MAX_NUM_BATCHED_TOKENS // batch if aligned else rng.randint(*_PROMPT_LENGTHS)
        message = EngineCoreRequest(
            request_id=f"{index:032x}",
            spec=RequestSpec(
                [rng.randrange(100_000) for _ in range(length)],
                SamplingParams(max_tokens=_MAX_MODEL_LEN - length),
            ),
            eos_token_ids=config.model.eos_token_ids,
            arrival_time=time.monotonic(),
        )
        scheduler.add_request(Request(message))


def run_steps(scheduler: Scheduler, workers: Workers, depth: int, num_steps: int) -> Samples:
    """Runs steps; those until all prompts are computed are not measured."""
    encoder = msgspec.msgpack.Encoder()
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
    samples = Samples()
    gc.collect()
    for number in range(_WARM_UP_STEPS + num_steps):
        started = time.perf_counter()
        step = scheduler.schedule()
        scheduled = time.perf_counter()
        assert step is not None
        message = encoder.encode(step)
        encoded = time.perf_counter()
        in_flight.append((step, workers.execute(step)))
        begun = time.perf_counter()
        if len(in_flight) == depth:
            scheduler.update_from_output(*in_flight.popleft())
        updated = time.perf_counter()
        if number >= _WARM_UP_STEPS:
            samples.schedule.append(1e6 * (scheduled - started))
            samples.encode.append(1e6 * (encoded - scheduled))
            samples.update.append(1e6 * (updated - begun))
            samples.sizes.append(len(message))
    return samples


def measure(
    batch: int, block_size: int, depth: int, num_steps: int, *, aligned: bool = False
) -> dict[str, Any]:
    """Returns the costs of one batch size: microseconds over all measured steps, and bytes."""
    rounds = [_measure_once(batch, block_size, depth, num_steps, aligned) for _ in range(_ROUNDS)]
    return min(rounds, key=lambda cost: cost["step_us"])


def _measure_once(
    batch: int, block_size: int, depth: int, num_steps: int, aligned: bool
) -> dict[str, Any]:
    rng = random.Random(batch)
    config = make_config(batch, block_size)
    scheduler = Scheduler(config, batch * -(-_MAX_MODEL_LEN // block_size), NoConnectorScheduler())
    add_requests(scheduler, config, batch, rng, aligned)
    samples = run_steps(scheduler, Workers(rng), depth, num_steps)
    stats = scheduler.stats()
    assert stats.num_running == batch
    assert stats.num_preemptions == 0
    total = sorted(s + u for s, u in zip(samples.schedule, samples.update, strict=True))
    return {
        "batch": batch,
        "block_size": block_size,
        "depth": depth,
        "aligned": aligned,
        "schedule_us": round(statistics.median(samples.schedule), 1),
        "update_us": round(statistics.median(samples.update), 1),
        "step_us": round(statistics.median(total), 1),
        "step_p99_us": round(percentile(total, 0.99), 1),
        "step_max_us": round(total[-1], 1),
        "encode_us": round(statistics.median(samples.encode), 1),
        "message_bytes": round(statistics.mean(samples.sizes), 1),
        "message_bytes_max": max(samples.sizes),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="measured steps of each batch")
    steps = parser.parse_args().steps
    costs = [
        measure(batch, block_size, depth, steps)
        for block_size in (16, 64)
        for depth in (1, 2)
        for batch in _BATCHES
    ]
    aligned = measure(256, 16, 1, steps, aligned=True)
    rows = [*costs, aligned]
    for row in rows:
        print(json.dumps(row))
    print(f"written to {write_result('scheduler', {'steps': rows})}")


if __name__ == "__main__":
    main()

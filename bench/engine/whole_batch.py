#!/usr/bin/env python3
"""Measures what the step message is worth: ours, against one with the whole batch in every step.

    ours         what workers cannot know; the next step is decided while one is computed
    whole batch  of each request its row, tokens, length, blocks and sampling parameters; the next
                 step is decided when the tokens of the one before are known

The second is bench code alone. Both run the scheduler at steady decode, without a model. A worker
decodes each message; the device computes for `--device-ms` a step, which is the one figure that is
assumed and not measured: it idles for what of the host's work is not hidden behind it.

    python -m bench.engine.whole_batch
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass

import msgspec

from bench.engine.scheduler import Workers, add_requests, make_config
from bench.record import write_result
from engine.contracts.outputs import ModelRunnerOutput
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import SchedulerOutput
from engine.sched.scheduler import Scheduler
from kv_transfer.no_connector import NoConnectorScheduler

_BATCHES = (32, 128, 256, 512)
_BLOCK_SIZE = 16
_WARM_UP_STEPS = 100


class WholeRow(msgspec.Struct, array_like=True):
    """Everything that a worker without a memory of its rows must be told of one request."""

    row: int
    epoch: int
    num_tokens: int
    last_token: int
    block_ids: list[int]
    sampling: SamplingParams


class WholeBatch:
    """Follows the rows of a batch as a worker would, to write all of them into each message."""

    def __init__(self) -> None:
        self._rows: dict[int, WholeRow] = {}

    def message_of(self, step: SchedulerOutput) -> list[WholeRow]:
        for new in step.new_reqs:
            self._rows[new.row] = WholeRow(
                new.row, new.epoch, new.prompt_len, 0, list(new.block_ids), new.sampling
            )
        for row, blocks in step.new_block_ids:
            self._rows[row].block_ids += blocks
        return list(self._rows.values())

    def sampled(self, output: ModelRunnerOutput) -> None:
        for row, token in zip(output.rows, output.token_ids, strict=True):
            self._rows[row].num_tokens += 1
            self._rows[row].last_token = token


@dataclass(slots=True)
class MessageCost:
    """One batch size and one kind of message; medians, in microseconds."""

    batch: int
    kind: str
    message_bytes: float
    schedule_us: float
    encode_us: float
    decode_us: float
    update_us: float
    idle_us: float
    step_us: float


def measure(batch: int, num_steps: int, device_us: float, *, whole: bool) -> MessageCost:
    """Runs a batch. `whole`: with the whole batch in each message, one step at a time."""
    rng = random.Random(batch)
    config = make_config(batch, _BLOCK_SIZE)
    num_blocks = batch * -(-config.model.max_model_len // _BLOCK_SIZE)
    scheduler = Scheduler(config, num_blocks, NoConnectorScheduler())
    add_requests(scheduler, config, batch, rng, False)
    workers, rows, encoder = Workers(rng), WholeBatch(), msgspec.msgpack.Encoder()
    decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(
        list[WholeRow] if whole else SchedulerOutput
    )
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
    names = "schedule", "encode", "decode", "update"
    times: dict[str, list[float]] = {name: [] for name in names}
    sizes = []
    gc.collect()
    for number in range(_WARM_UP_STEPS + num_steps):
        marks = [time.perf_counter()]
        step = scheduler.schedule()
        assert step is not None
        content = rows.message_of(step) if whole else step
        marks.append(time.perf_counter())
        message = encoder.encode(content)
        marks.append(time.perf_counter())
        decoder.decode(message)
        marks.append(time.perf_counter())
        output = workers.execute(step)
        if whole:
            rows.sampled(output)
        in_flight.append((step, output))
        begun = time.perf_counter()
        if len(in_flight) == (1 if whole else 2):
            scheduler.update_from_output(*in_flight.popleft())
        updated = time.perf_counter()
        if number >= _WARM_UP_STEPS:
            spent = [1e6 * (b - a) for a, b in itertools.pairwise(marks)]
            for name, value in zip(times, [*spent, 1e6 * (updated - begun)], strict=True):
                times[name].append(value)
            sizes.append(len(message))
    medians = {name: statistics.median(values) for name, values in times.items()}
    host_us = sum(medians.values())
    idle_us = host_us if whole else max(0.0, host_us - device_us)
    return MessageCost(
        batch,
        "whole batch" if whole else "ours",
        round(statistics.mean(sizes), 1),
        round(medians["schedule"], 1),
        round(medians["encode"], 1),
        round(medians["decode"], 1),
        round(medians["update"], 1),
        round(idle_us, 1),
        round(device_us + idle_us, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=500, help="measured steps of each batch")
    parser.add_argument("--device-ms", type=float, default=10.0, help="a step on the device")
    arguments = parser.parse_args()
    costs = []
    for batch in _BATCHES:
        for whole in (True, False):
            cost = measure(batch, arguments.steps, 1000 * arguments.device_ms, whole=whole)
            costs.append(asdict(cost))
            print(" ".join(f"{name}={value}" for name, value in asdict(cost).items()), flush=True)
    path = write_result("whole-batch", {"device_ms": arguments.device_ms, "steps": costs})
    print(f"written to {path}")


if __name__ == "__main__":
    main()

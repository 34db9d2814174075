"""Measures a step of a beam search beside one of as many sampled choices.

    python -m bench.engine.beams                      the scheduler alone: results are made up
    python -m bench.engine.beams --device cuda        an engine on one GPU, whose waits are counted
    python -m bench.engine.beams --device cpu --shape tiny        the same engine here

A step takes all beams, or choices, of all searches one token further. The scheduler's part: its
time, what of it is the selection across the beams of searches, the bytes of its messages to
workers, blocks that they copy and tables that they are sent. The engine's: milliseconds a step, of
which the worker's host takes some to start it, beside choices with as many log probabilities as
beams have candidates; and how often the host waited for the GPU in steps that were started (nothing
may). Writes bench/results/beams-scheduler.json or beams-DEVICE.json.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from unittest.mock import patch

import msgspec
import torch

from bench.engine.models.shapes import SHAPES, shape_config
from bench.engine.scheduler import Workers, make_config
from bench.record import write_result
from engine.config import EngineConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.outputs import ModelRunnerOutput, RowSiblings, SiblingTokens, TokenLogprobs
from engine.contracts.request import Request
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import BeamParams, SamplingParams
from engine.contracts.scheduler_output import NewRequestData, SchedulerOutput
from engine.executor.uniproc_executor import UniprocExecutor
from engine.sample.beam_choice import choose_beams
from engine.sched.choices.beam_search import BeamSearch, Hypothesis
from engine.sched.scheduler import Scheduler
from engine.speed.offline_engine import offline_engine
from kv_transfer.no_connector import NoConnectorScheduler

_BLOCK_SIZE = 64
_MAX_TOKENS = 128
_CASES = [(width, num_searches, 500) for width in (4, 8, 16) for num_searches in (1, 16, 64)] + [
    (4, 8, 64),
    (4, 8, 2000),
]
"""Triples (width, searches, tokens of their prompts)."""
_MOST_ROWS = 512


@dataclass(slots=True)
class SchedulerCost:
    """Medians over the steps of `num_searches` that grow `width` answers each behind
    `prompt_tokens`; times in microseconds."""

    kind: str
    num_searches: int
    width: int
    prompt_tokens: int
    step_us: float
    step_us_each: float
    selection_us: float
    message_bytes: float
    copies: float
    table_entries: float


@dataclass(slots=True)
class Seats:
    """A search whose beams keep their rows, by seat."""

    rows: list[int]
    scores: list[float]
    ranks: list[int]

    def choose(self, result: ModelRunnerOutput) -> None:
        """Puts the next beams' tokens in the place of those that were drawn. Nothing ends them."""
        places = [result.rows.index(row) for row in self.rows]
        found = [result.logprobs[place] for place in places]
        chosen = choose_beams(
            torch.tensor([[one.token_ids[1:] for one in found]]),
            torch.tensor([[one.logprobs[1:] for one in found]], dtype=torch.float32),
            torch.tensor([self.scores], dtype=torch.float64),
            torch.tensor([self.ranks]),
            torch.full((1, 1), -1),
        )
        self.scores, self.ranks = chosen.scores[0].tolist(), chosen.ranks[0].tolist()
        for place, token_id in zip(places, chosen.token_ids[0].tolist(), strict=True):
            result.token_ids[place] = token_id


class Guesses(Workers):
    """Answers with candidates where they are wanted, and with first tokens of choices."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._new: dict[int, NewRequestData] = {}  # [row]
        self._seats: dict[int, Seats] = {}  # [number of the search]

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        result = super().execute(step)
        for row in step.finished_rows:
            seat = self._new.pop(row).beam
            if seat is not None:
                self._seats.pop(seat.search, None)
        for new in step.new_reqs:
            self._enter(new)
        self._guess(result)
        for seats in self._seats.values():
            if seats.rows[0] in result.rows:
                seats.choose(result)
        return result

    def _enter(self, new: NewRequestData) -> None:
        self._new[new.row] = new
        if new.beam is not None:
            seats = self._seats.setdefault(new.beam.search, Seats([], [], []))
            seats.rows.append(new.row)
            seats.scores.append(new.beam.score)
            seats.ranks.append(new.beam.index)

    def _guess(self, result: ModelRunnerOutput) -> None:
        for index, row in enumerate(result.rows):
            new = self._new[row]
            if more := new.sibling_seeds:
                tokens = [self._rng.randrange(100_000) for _ in more]
                result.siblings.append(
                    RowSiblings(row, result.epochs[index], SiblingTokens(tokens))
                )
            if new.sampling.logprobs is not None:
                tokens = self._rng.sample(range(1, 100_000), new.sampling.logprobs)
                scores = sorted((-4 * self._rng.random() for _ in tokens), reverse=True)
                scores = torch.tensor(scores, dtype=torch.float32).tolist()
                found = TokenLogprobs([tokens[0], *tokens], [scores[0], *scores], 1)
                result.logprobs[index] = found


class SelectionTimer:
    """Takes the time of selections in `measured()`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._select = BeamSearch.advance

    @contextmanager
    def measured(self) -> Iterator[None]:
        def advance(search: BeamSearch, found: Sequence[TokenLogprobs]) -> list[Hypothesis]:
            began = time.perf_counter()
            chosen = self._select(search, found)
            self._seconds += time.perf_counter() - began
            return chosen

        with patch.object(BeamSearch, "advance", advance):
            yield

    def take(self) -> float:
        """Returns the seconds since the last time."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def asked(kind: str, index: int, width: int, prompt: list[int]) -> EngineCoreRequest:
    """Returns a request for `width` answers of `_MAX_TOKENS` tokens: beams, sampled choices, or
    choices with the candidates that beams would have."""
    beam = BeamParams(width) if kind == "beams" else None
    sampling = SamplingParams(
        temperature=0.0 if beam else 1.0,
        max_tokens=_MAX_TOKENS,
        ignore_eos=True,
        beam=beam,
        logprobs=BeamParams(width).num_candidates(0) if kind == "candidates" else None,
    )
    return EngineCoreRequest(
        request_id=f"{index:032x}",
        spec=RequestSpec(prompt, sampling, sibling_seeds=tuple(range(1, width))),
        choice_ids=tuple(f"{index:030x}.{i}" for i in range(width)),
        arrival_time=time.monotonic(),
    )


def cost_of(kind: str, width: int, num_searches: int, num_prompt_tokens: int) -> SchedulerCost:
    timer = SelectionTimer()
    with timer.measured():
        return _cost_of(kind, width, num_searches, num_prompt_tokens, timer)


def _cost_of(
    kind: str, width: int, num_searches: int, num_prompt_tokens: int, timer: SelectionTimer
) -> SchedulerCost:
    rng = random.Random(num_searches)
    config = make_config(num_searches * width, _BLOCK_SIZE)
    blocks = num_searches * (num_prompt_tokens + width * 4 * _MAX_TOKENS) // _BLOCK_SIZE + 64
    scheduler = Scheduler(config, blocks, NoConnectorScheduler())
    for index in range(num_searches):
        prompt = [rng.randrange(100_000) for _ in range(num_prompt_tokens)]
        scheduler.add_request(Request(asked(kind, index, width, prompt)))
    workers = Guesses(rng)
    encoder = msgspec.msgpack.Encoder()
    times, selections, sizes, copies, tables = [], [], [], [], []
    gc.collect()
    gc.freeze()  # As engines do, whose collector is seldom.
    gc.disable()
    while scheduler.has_unfinished_requests():
        began = time.perf_counter()
        step = scheduler.schedule()
        scheduled = time.perf_counter()
        assert step is not None
        result = workers.execute(step)
        again = time.perf_counter()
        scheduler.update_from_output(step, result)
        ended, selection_s = time.perf_counter(), timer.take()
        if len(result.rows) == num_searches * width:
            times.append(1e6 * (ended - again + scheduled - began))
            selections.append(1e6 * selection_s)
            sizes.append(len(encoder.encode(step)))
            copies.append(len(step.block_copies))
            tables.append(sum(len(new.block_ids) for new in step.new_reqs))
    gc.enable()
    gc.unfreeze()
    assert len(times) > _MAX_TOKENS / 2 and scheduler.stats().num_preemptions == 0
    step_us = statistics.median(times)
    return SchedulerCost(
        kind,
        num_searches,
        width,
        num_prompt_tokens,
        round(step_us, 1),
        round(step_us / (num_searches * width), 1),
        round(statistics.median(selections), 1),
        round(statistics.median(sizes), 1),
        round(statistics.mean(copies), 2),
        round(statistics.mean(tables), 1),
    )


def of_scheduler() -> dict[str, object]:
    found = []
    for case in _CASES:
        width, num_searches, num_prompt_tokens = case
        if width * num_searches > _MOST_ROWS:
            continue
        for cost in (cost_of("choices", *case), cost_of("beams", *case)):
            found.append(asdict(cost))
            print(
                f"{cost.kind:>8}  {num_searches} x {width} behind {num_prompt_tokens:4}:  "
                f"{cost.step_us:8.1f} us a step, {cost.step_us_each:6.1f} each, "
                f"selection {cost.selection_us:6.1f}, "
                f"{cost.message_bytes:9.0f} bytes, {cost.copies:5.2f} blocks copied",
                flush=True,
            )
    return {"max_tokens": _MAX_TOKENS, "block_size": _BLOCK_SIZE, "costs": found}


class WatchedExecutor(UniprocExecutor):
    """Counts how often the host waits for the GPU while it starts steps."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._is_cuda = config.device.device == "cuda"
        self.num_waits = 0

    def execute_model(self, step: object) -> None:
        if not self._is_cuda:
            super().execute_model(step)  # type: ignore[arg-type]
            return
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                super().execute_model(step)  # type: ignore[arg-type]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.num_waits += sum("synchroniz" in str(one.message) for one in found)


def of_engine(device: str, shape: str, width: int, num_prompt_tokens: int) -> dict[str, object]:
    config = shape_config(
        shape, device=device, max_num_seqs=8 * width, block_size=_BLOCK_SIZE, max_model_len=4096
    )
    if device == "cpu":
        config = replace(config, cache=replace(config.cache, num_blocks=1024))
    figures: dict[str, dict[str, float]] = {}
    executor = WatchedExecutor(config)
    with offline_engine(config, executor) as engine:
        for num_searches in (1, 8):
            for kind in 2 * ("choices", "candidates", "beams"):  # The second time is warm.
                prompts = [
                    engine.request(num_prompt_tokens, 1).spec.prompt_token_ids
                    for _ in range(num_searches)
                ]
                executor.num_waits = 0
                before = engine.core.stats()
                began = time.perf_counter()
                engine.run([asked(kind, i, width, prompt) for i, prompt in enumerate(prompts)])
                seconds = time.perf_counter() - began
                after = engine.core.stats()
                steps = after.num_steps - before.num_steps
                host_s = after.worker_host_s - before.worker_host_s
                name = f"{kind} {num_searches} x {width}"
                figures[name] = {
                    "ms_per_token": round(1000 * seconds / _MAX_TOKENS, 3),
                    "steps_per_token": round(steps / _MAX_TOKENS, 2),
                    "worker_host_ms": round(1000 * host_s / steps, 3),
                    "waits": executor.num_waits,
                }
                print(f"{name}: {figures[name]}", flush=True)
    return {"model": shape, "prompt_tokens": num_prompt_tokens, "figures": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="a whole engine; default: none")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    args = parser.parse_args()
    if args.device is None:
        print(write_result("beams-scheduler", of_scheduler()))
        return
    figures = of_engine(args.device, args.shape, args.width, args.prompt_tokens)
    print(write_result(f"beams-{args.device}", figures))


if __name__ == "__main__":
    main()

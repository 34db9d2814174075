"""Times steps of one worker that no scheduler decides: any contexts, without computing them first.

1. `bare_steps(config)` starts a worker in this process
2. `decode_s(contexts)`, `prompts_s(prompts)` time steps, each from an empty batch to an empty one
3. `bare_steps` closes it behind a `with`

Contexts count as computed, and their KV is random, so a batch behind 64k tokens each costs nothing
to begin. Blocks of different requests differ as long as the cache has enough, and those that a
window has left are none; sums over what they hold mean nothing, and take their time.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from bench.engine.models.planted import uniform_routing
from engine.config import EngineConfig
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import NewRequestData, SchedulerOutput
from engine.executor.precompiling import start_precompiling
from engine.worker.async_output import AsyncOutput
from engine.worker.worker import Worker
from host.child_process import stop_all
from kv_transfer.layout import own_groups

_WARM_STEPS, _STEPS = 4, 24
_REPEATS = 4
_IN_FLIGHT = 2
_STRIDE = 7919
"""A prime, by which tokens that shall differ are apart."""
_PIECE_BYTES = 999_999_937
"""A prime, so that what is filled with the same bytes again lies otherwise in its block."""


class BareSteps:
    """One worker with random weights.

    Args:
        config: Of one rank; nothing drafts.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._groups = own_groups(config.kv_layout.groups)
        self._worker = Worker(config, rank=0, rendezvous="")
        self._step_id = 0
        self._next_block = 0
        helpers = start_precompiling(config)
        self._worker.init_device()
        self._worker.load_model(lambda fraction: None)
        self.num_blocks = self._worker.determine_num_blocks()
        self._worker.initialize_kv_cache(self.num_blocks)
        self._worker.capture_model(lambda stage, fraction: None)
        stop_all(helpers)
        self.runner, self.shutdown = self._worker.runner, self._worker.shutdown
        _fill(self.runner.kv_pages)

    def fits(self, contexts: Sequence[int]) -> bool:
        """Returns whether requests of these lengths have blocks of their own, and rows."""
        more = _WARM_STEPS + _STEPS + 2
        blocks = sum(
            group.num_blocks_for(context + more) - group.first_block_seen(context - 1)
            for context in contexts
            for group in self._groups
        )
        limits = self._config
        return (
            blocks <= self.num_blocks
            and len(contexts) <= limits.scheduler.max_num_seqs
            and max(contexts) + more <= limits.model.max_model_len
        )

    def decode_s(self, contexts: Sequence[int]) -> float:
        """Returns the median seconds of a step in which each request computes one token behind
        this many."""
        rows = list(range(len(contexts)))
        more = _WARM_STEPS + _STEPS + 2
        requests = [
            self._request(row, context - 1, 1, more) for row, context in enumerate(contexts)
        ]
        first = self._beginning(requests)
        first.prefill_chunks = [(row, 1) for row in rows]
        decoding = [SchedulerOutput(step_id=0) for _ in range(_WARM_STEPS + _STEPS)]
        decoding[0].decode_add = rows
        ends = self._run([first, *decoding, _end(rows)])
        return statistics.median(np.diff(ends[_WARM_STEPS : 1 + _WARM_STEPS + _STEPS]).tolist())

    def prompts_s(self, prompts: Sequence[tuple[int, int]]) -> float:
        """Returns the median seconds from the first step of prompts (tokens, tokens before) until
        all have a token. In order, each step takes as much of them as its budget allows."""
        found = [self.prompt_ends(prompts)[-1] for _ in range(_REPEATS)]
        return statistics.median(found[1:])

    def prompt_ends(self, prompts: Sequence[tuple[int, int]]) -> list[float]:
        """Returns for each step of such prompts the seconds until its end, from when the first one
        began."""
        chunks = self.chunks([length for length, _ in prompts])
        first = self._beginning(
            [self._request(row, before, length, 1) for row, (length, before) in enumerate(prompts)]
        )
        first.prefill_chunks = chunks[0]
        rest = [SchedulerOutput(step_id=0, prefill_chunks=chunk) for chunk in chunks[1:]]
        started = time.perf_counter()
        ends = self._run([first, *rest, _end(range(len(prompts)))])
        return [end - started for end in ends[: len(chunks)]]

    def chunks(self, left: list[int]) -> list[list[tuple[int, int]]]:
        """Returns the chunks (row, tokens) of each step."""
        steps: list[list[tuple[int, int]]] = []
        while any(left):
            room = self._config.scheduler.max_num_batched_tokens
            steps.append([])
            for row, tokens in enumerate(left):
                if taken := min(tokens, room):
                    steps[-1].append((row, taken))
                    left[row] -= taken
                    room -= taken
        return steps

    def _request(self, row: int, computed: int, length: int, more: int) -> NewRequestData:
        places = np.arange(row, row + computed + length, dtype=np.int64)
        tokens = places * _STRIDE % self._config.model.vocab_size
        return NewRequestData(
            row=row,
            epoch=0,
            prompt_len=computed + length,
            prefill_token_ids=tokens.astype(np.int32).tobytes(),
            num_computed_tokens=computed,
            block_ids=self._blocks(0, computed, computed + length + more),
            max_len=computed + length + more,
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
        )

    def _blocks(self, group: int, computed: int, num_tokens: int) -> list[int]:
        """Returns the next blocks of the cache, and its first again behind the last. In place of
        those that no token behind `computed` sees stands its first."""
        left = self._groups[group].first_block_seen(computed)
        count = self._groups[group].num_blocks_for(num_tokens) - left
        first, self._next_block = self._next_block, self._next_block + count
        return [0] * left + [index % self.num_blocks for index in range(first, first + count)]

    def _beginning(self, requests: list[NewRequestData]) -> SchedulerOutput:
        """Returns the step in which requests come, with their blocks of all groups."""
        count = len(self._groups)
        others = [
            (
                request.row * count + group,
                self._blocks(group, request.num_computed_tokens, request.max_len),
            )
            for request in requests
            for group in range(1, count)
        ]
        return SchedulerOutput(step_id=0, new_reqs=requests, new_block_ids=others)

    def _run(self, steps: Sequence[SchedulerOutput]) -> list[float]:
        """Runs steps one behind the other, two in flight, and returns when each had ended."""
        ends = []
        in_flight: deque[AsyncOutput] = deque()
        for step in steps:
            self._step_id += 1
            step.step_id = self._step_id
            in_flight.append(self._worker.start_step(step))
            if len(in_flight) == _IN_FLIGHT:
                in_flight.popleft().get_output()
                ends.append(time.perf_counter())
        in_flight.popleft().get_output()
        return [*ends, time.perf_counter()]


def _fill(pages: torch.Tensor) -> None:
    """Fills `pages` [any shape] with bytes that make numbers of either sign between 2^-31 and 2 in
    any format: equal ones, as fresh memory has, would be the slowest case for a choice among
    scores."""
    pieces = pages.view(torch.uint8).view(-1).split(_PIECE_BYTES)
    noise = torch.randint(0x30, 0x40, (len(pieces[0]),), dtype=torch.uint8, device=pages.device)
    noise |= torch.randint_like(noise, 2) << 7
    for piece in pieces:
        piece.copy_(noise[: len(piece)])


def _end(rows: Sequence[int]) -> SchedulerOutput:
    return SchedulerOutput(step_id=0, finished_rows=list(rows))


@contextmanager
def bare_steps(config: EngineConfig) -> Iterator[BareSteps]:
    """Starts a worker, for which the last one's memory is given back, and ends it. Experts are
    chosen uniformly."""
    gc.collect()
    torch.cuda.empty_cache()
    with uniform_routing(config.scheduler.max_num_batched_tokens):
        steps = BareSteps(config)
        yield steps
        steps.shutdown()

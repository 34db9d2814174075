"""Drives an engine without a server: scheduler in this process, workers in theirs, prompts of
random tokens.

1. `OfflineEngine(config)` starts the workers
2. `run(requests)` returns when all have ended, with the time of each step's result
3. `close`
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import zmq

from edge.program import settle
from engine.config import EngineConfig
from engine.contracts.messages import EngineCoreOutput, EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.core.core import EngineCore
from engine.executor.abstract import Executor
from engine.executor.multiproc_executor import MultiprocExecutor
from host.sockets.local_socket import Context

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step's result. `at`: perf_counter seconds when it was processed; `num_tokens` it
    brought.
    """

    at: float
    num_tokens: int


class OfflineEngine:
    """Drives an engine in this process. `executor`: None for worker processes."""

    def __init__(self, config: EngineConfig, executor: Executor | None = None) -> None:
        self._context = Context()
        self.vocab_size = config.model.vocab_size
        self._random = random.Random(0)
        self._next_id = 0
        started = time.perf_counter()
        self.executor = executor or MultiprocExecutor(config, self._context)
        try:
            self.core = EngineCore(config, self.executor, _ProgressLine())
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - started
        self._poller = zmq.Poller()
        for source in self.executor.poll_sources:
            self._poller.register(source, zmq.POLLIN)

    def request(
        self, num_prompt_tokens: int, max_tokens: int, sampling: SamplingParams = GREEDY
    ) -> EngineCoreRequest:
        """Makes a request with a prompt of its own, and exactly `max_tokens` of output unless a
        grammar ends it."""
        self._next_id += 1
        sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens, ignore_eos=True)
        return EngineCoreRequest(
            request_id=str(self._next_id),
            spec=RequestSpec(
                [self._random.randrange(1, self.vocab_size) for _ in range(num_prompt_tokens)],
                sampling,
            ),
        )

    def run(
        self,
        requests: list[EngineCoreRequest],
        on_step: Callable[[StepResult], None] = lambda step: None,
        on_outputs: Callable[[list[EngineCoreOutput]], None] = lambda outputs: None,
    ) -> list[StepResult]:
        """Runs requests that all come at once. Steps that brought no token are not listed."""
        for request in requests:
            self.core.handle(request)
        steps = []
        left = sum(len(request.choice_ids) or 1 for request in requests)
        while True:
            results = self.core.step()
            on_outputs(results.outputs)
            num_tokens = sum(len(output.new_token_ids) for output in results.outputs)
            if num_tokens:
                steps.append(StepResult(time.perf_counter(), num_tokens))
                on_step(steps[-1])
            left -= sum(bool(output.finish_reason) for output in results.outputs)
            if left == 0 and self.core.is_idle:
                return steps
            self.wait()

    def wait(self) -> None:
        """Waits until workers report, or a step that is held back is due."""
        held_until = self.core.next_step_at
        left_s = None if held_until is None else max(0.0, held_until - time.monotonic())
        self._poller.poll(None if left_s is None else int(1e3 * left_s))

    def close(self) -> None:
        self.executor.shutdown()
        self._context.destroy()


@contextmanager
def offline_engine(
    config: EngineConfig, executor: Executor | None = None
) -> Iterator[OfflineEngine]:
    """Starts an engine, and closes it."""
    # Parts of an engine before refer to each other, and would keep its memory.
    gc.collect()
    engine = OfflineEngine(config, executor)
    # Or full collections look at all libraries, in the middle of what is measured.
    thresholds = gc.get_threshold()
    settle()
    try:
        yield engine
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        engine.close()


class _ProgressLine:
    """Shows how far a stage is, in one line, and each percent once."""

    def __init__(self) -> None:
        self._shown = ""

    def __call__(self, stage: str, fraction: float, total_bytes: int = 0) -> None:
        text = f"{stage} {fraction:4.0%}"
        if text != self._shown:
            end = "\n" if fraction >= 1.0 else ""
            print(f"\r{text}", end=end, file=sys.stderr, flush=True)
            self._shown = text

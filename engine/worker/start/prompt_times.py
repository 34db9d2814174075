"""Times steps of prompts before anything waits for one: from how many tokens on is a step full?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.steps.step_shapes import counts_to_measure
from engine.worker.dummy_steps import DummyStep

if TYPE_CHECKING:
    from engine.worker.model_runner import ModelRunner

_LENGTH = 512
"""Steps are filled with prompts of this length, so that attention counts for little."""
_TIMES = 3
"""Each step is run this many times; the quickest counts."""


def measures_prompts(config: EngineConfig) -> bool:
    """Returns whether an engine times its prompts: one whose order of prompts depends on it, and
    whose ranks all compute each step together."""
    limits, parallel = config.scheduler, config.parallel
    is_whole = parallel.pipeline_parallel_size == 1 and parallel.data_parallel_size == 1
    is_asked = limits.prompt_order != "arrival" and not limits.full_step_tokens
    return is_whole and is_asked and limits.enable_chunked_prefill


def time_prompt_steps(runner: ModelRunner, config: EngineConfig) -> list[tuple[int, float]]:
    """Returns tokens and seconds of steps of prompts, from few tokens to all that a step may have.
    All ranks run them together. Overwrites the first blocks of the cache; no row may be in use."""
    found = []
    for count in counts_to_measure(config.scheduler.max_num_batched_tokens):
        lengths = _lengths(count, config)
        if lengths:
            step = DummyStep(lengths, SamplingParams(), is_varied=True)
            found.append((sum(lengths), min(_seconds(runner, config, step) for _ in range(_TIMES))))
    return found


def _lengths(num_tokens: int, config: EngineConfig) -> list[int]:
    """Returns the lengths of prompts with this many tokens together; none if they do not fit."""
    length = min(_LENGTH, num_tokens, config.model.max_model_len - 1)
    count = num_tokens // length
    return [length] * count if count <= config.scheduler.max_num_seqs else []


def _seconds(runner: ModelRunner, config: EngineConfig, dummy: DummyStep) -> float:
    first, *rest = dummy.messages(config, num_blocks=runner.kv_pages.shape[1])
    started = time.perf_counter()
    runner.execute_model(first).get_output()
    took_s = time.perf_counter() - started
    for step in rest:
        runner.execute_model(step).get_output()
    return took_s

"""Finds which compiled kernels steps need, without a GPU.

1. `kernel_keys(config, gpu, batches)` passes batches through the model, of meta tensors
2. each operation's launcher runs on them; in place of a launch Triton's own key of the compilation
   is kept: types, alignments and constants of the arguments, and options

Two steps with the same keys need no compilation between them. What is compiled outside the model
(inputs of a step, sampling) is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from engine.config import EngineConfig
from engine.contracts.steps.step_launches import GraphKey
from engine.explain.explanation import NOWHERE, Batch, asked_model
from engine.explain.launched_kernels import KernelKey, keeping
from engine.explain.launches import Launches
from engine.models.recorded_steps import launches_of
from engine.worker.attention_of_model import masked_tokens_of
from engine.worker.dummy_steps import DummyStep, largest_steps, warm_up_steps
from tandem_kernels import ops
from tandem_kernels.device import GpuFacts


def kernel_keys(
    config: EngineConfig, gpu: GpuFacts, batches: Sequence[Batch], *, has_flash: bool = True
) -> Generator[set[KernelKey]]:
    """Yields the kernels that the first rank of an engine needs for the model in each step.

    Args:
        has_flash: FlashAttention 3 is installed there.

    Raises:
        CannotStartError: The engine could not start either; says why.
    """
    keys: set[KernelKey] = set()
    with (
        keeping(gpu, lambda one: keys.add(one.key)),
        launching_model(config, gpu, has_flash=has_flash) as run,
    ):
        for batch in batches:
            keys.clear()
            run(batch)
            yield set(keys)


@contextmanager
def launching_model(
    config: EngineConfig, gpu: GpuFacts, *, has_flash: bool
) -> Iterator[Callable[[Batch], object]]:
    """Makes the model of meta tensors and gives the pass of a batch through it, in which every
    operation's launcher runs."""
    launches = Launches(on_kernel=_run_launcher)
    with asked_model(config, gpu, launches, has_flash) as run:
        yield run


def warm_up_batches(config: EngineConfig) -> list[Batch]:
    """Returns what runs before anything waits: steps, and those that graphs record."""
    steps = [_batch_of(step) for step in steps_before_ready(config)]
    steps += [batch_of_graph(key, config) for key in launches_of(config).keys]
    return list(dict.fromkeys(steps))


def steps_before_ready(config: EngineConfig) -> list[DummyStep]:
    """Returns the steps that a worker runs at its start: to measure memory, and to warm up."""
    limits = config.scheduler
    sizes = limits.max_num_batched_tokens, limits.max_num_seqs, config.model
    masked = masked_tokens_of(config, NOWHERE)
    largest = largest_steps(*sizes, expands_contexts=True, masked_tokens=masked)
    return [*largest, *warm_up_steps(config, NOWHERE)]


def batch_of_graph(key: GraphKey, config: EngineConfig) -> Batch:
    """Returns the step with which a graph is recorded."""
    if key.decodes:
        return Batch(key.num_reqs, config.model.max_model_len)
    alike = key._replace(samples=True)
    return Batch(0, 0, (key.num_tokens,), num_logits=key.num_reqs * key.width, graph=alike)


def _batch_of(step: DummyStep) -> Batch:
    prompts = tuple(length for length in step.lengths if length > 1)
    decodes = len(step.lengths) - len(prompts)
    asked = None if step.sampling.prompt_logprobs is None else sum(step.lengths)
    return Batch(decodes, step.num_cached + 1, prompts, step.num_cached, asked)


def _run_launcher(op: ops.Op[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op.kernel(*args, **kwargs)

"""The process that compiles an engine's kernels, on all cores, while its workers load weights.

    1. ends at once where another does, or has done, the same (`engine.worker.start.kernel_cache`)
    2. children, forks of this process, run warm-up's steps, each some of them, without a GPU: the
       model on meta tensors, the runner on the CPU; each tells which kernels they launch
    3. each gets some of these to compile; workers wait until all have ended

A kernel that is not found here is compiled by the worker that needs it, as all are without this
process. It ends with the process that started it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from edge.logs.setup import setup_logging
from engine.config import EngineConfig
from engine.worker.start.kernel_cache import KernelCache
from engine.worker.start.precompile_config import PrecompileConfig
from host.child_process import read_config
from host.termination import die_with_parent

if TYPE_CHECKING:
    from engine.explain.launched_kernels import Compilation, KernelKey
    from tandem_kernels.device import GpuFacts

logger = logging.getLogger(__name__)

_MAX_PROCESSES = 16
_NICE = 5
"""Leaves the cores to the workers first."""
_FORK = multiprocessing.get_context("fork")
"""Children have imported everything. This process has no threads, and no GPU."""


class _Share:
    """A child that finds kernels by `look`, which calls what it is given with each, and compiles
    those that it gets of them."""

    def __init__(self, look: Callable[[Callable[[Compilation], None]], None]) -> None:
        self._here, there = _FORK.Pipe()
        self._process = _FORK.Process(target=_work, args=(there, look))
        self._process.start()
        there.close()

    def found(self) -> set[KernelKey]:
        keys: set[KernelKey] = self._here.recv()
        return keys

    def give(self, keys: Sequence[KernelKey]) -> None:
        self._here.send(keys)

    def num_failed(self) -> int:
        """Waits for the end. Returns how many kernels did not compile."""
        count: int = self._here.recv()
        self._process.join()
        return count


def _work(pipe: Connection, look: Callable[[Callable[[Compilation], None]], None]) -> None:
    die_with_parent()
    kernels: dict[KernelKey, Compilation] = {}

    def keep(found: Compilation) -> None:
        kernels.setdefault(found.key, found)

    look(keep)
    pipe.send(set(kernels))
    num_failed = 0
    for key in pipe.recv():
        try:
            kernels[key].compile()
        except Exception:
            logger.warning("%s does not compile ahead of time", key.kernel, exc_info=True)
            num_failed += 1
    pipe.send(num_failed)


def compile_ahead(
    config: EngineConfig, gpu: GpuFacts, *, has_flash: bool, num_processes: int
) -> tuple[int, int]:
    """Compiles the kernels of warm-up's steps. Returns how many there are, and how many failed.

    Raises:
        EOFError: A child has ended before its time.
    """
    from engine.explain.kernel_keys import (
        launching_model,
        steps_before_ready,
        warm_up_batches,
    )
    from engine.explain.launched_kernels import keeping
    from engine.explain.launching_runner import launching_runner
    from tandem_kernels.device import as_on

    of_runner = max(1, num_processes // 4)
    of_model = max(1, num_processes - of_runner)

    def look_at_runner(index: int, keep: Callable[[Compilation], None]) -> None:
        with as_on(gpu), keeping(gpu, keep), launching_runner(config) as run:
            for step in steps_before_ready(config)[index::of_runner]:
                run(step)

    def look_at_model(index: int, keep: Callable[[Compilation], None]) -> None:
        with keeping(gpu, keep):
            for batch in warm_up_batches(config)[index::of_model]:
                run_model(batch)

    shares = [_Share(partial(look_at_runner, index)) for index in range(of_runner)]
    with launching_model(config, gpu, has_flash=has_flash) as run_model:
        shares += [_Share(partial(look_at_model, index)) for index in range(of_model)]
    found = [share.found() for share in shares]
    for share, keys in zip(shares, shared_out(found), strict=True):
        share.give(keys)
    return len(set().union(*found)), sum(share.num_failed() for share in shares)


def shared_out(found: Sequence[set[KernelKey]]) -> list[list[KernelKey]]:
    """Gives each kernel to one of the children that found it, so that they have about as many."""
    finders: dict[KernelKey, list[int]] = {}
    for child, keys in enumerate(found):
        for key in keys:
            finders.setdefault(key, []).append(child)
    shares: list[list[KernelKey]] = [[] for _ in found]
    for key, children in sorted(finders.items(), key=lambda item: (len(item[1]), item[0])):
        shares[min(children, key=lambda child: len(shares[child]))].append(key)
    return shares


def _facts(gpu: int) -> GpuFacts:
    """Asks a child: a process that has looked at a GPU should not fork."""
    from concurrent.futures import ProcessPoolExecutor

    import torch

    from tandem_kernels.device import gpu_facts

    with ProcessPoolExecutor(1, mp_context=_FORK) as asked:
        facts = asked.submit(gpu_facts, torch.device("cuda", gpu)).result()
    assert facts is not None
    return facts


def main() -> None:
    config = read_config(PrecompileConfig)
    setup_logging(config.log, f"kernels of {config.engine.engine_id}", is_child=True)
    # What kernels say of missing tables the worker says, too, and once.
    logging.getLogger("tandem_kernels").setLevel(logging.ERROR)
    cache = KernelCache(config.engine)
    if not cache.begin():
        return
    os.nice(_NICE)
    from engine.layers.attention.whole_prompts import flash_attention

    try:
        count, num_failed = compile_ahead(
            config.engine,
            _facts(config.engine.device.first_gpu),
            has_flash=flash_attention.attends_prompts(),
            num_processes=min(_MAX_PROCESSES, len(os.sched_getaffinity(0))),
        )
    except Exception:
        logger.warning("no kernels are compiled ahead: workers will do it", exc_info=True)
        return
    logger.info("%d kernels are compiled", count - num_failed)
    if not num_failed:
        cache.finish()

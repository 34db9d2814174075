"""Runs a bench's ranks: one process each, started alike and ended together."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Concatenate, ParamSpec

P = ParamSpec("P")


def run_ranks(
    count: int, run_rank: Callable[Concatenate[int, P], None], *args: P.args, **kwargs: P.kwargs
) -> int:
    """Runs `run_rank(rank, *args, **kwargs)` in `count` new processes, and returns when all have
    ended: 0, or 1 if one ended badly. The others are ended then, because a collective would wait
    for it. `run_rank` is a module's own function."""
    context = multiprocessing.get_context("spawn")
    running = [
        context.Process(target=run_rank, args=(rank, *args), kwargs=kwargs) for rank in range(count)
    ]
    for process in running:
        process.start()
    failed = False
    while running:
        wait([process.sentinel for process in running])
        # Asked once each: a process that ends between two questions would be forgotten, not failed.
        exit_codes = {process: process.exitcode for process in running}
        failed = failed or any(exit_codes.values())
        running = [process for process, code in exit_codes.items() if code is None]
        if failed:
            for process in running:
                process.terminate()
    return int(failed)


def require_gpus(count: int) -> None:
    """Ends the program where fewer GPUs are here."""
    import torch

    if torch.cuda.device_count() < count:
        sys.exit(f"{count} GPUs are needed, and {torch.cuda.device_count()} are here")

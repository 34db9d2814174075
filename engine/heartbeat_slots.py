"""Assigns the places of the engine's signs of life to processes: the core, then the workers by
rank, then the transfer processes as they are counted in `TransferEvent`.
"""

from __future__ import annotations

from engine.config import EngineConfig

CORE_PLACE = 0


def worker_place(rank: int) -> int:
    """Returns the place of the worker of `rank`."""
    return 1 + rank


def first_transfer_place(config: EngineConfig) -> int:
    """Returns the place of transfer process 0."""
    return 1 + config.parallel.num_ranks


def num_places(config: EngineConfig) -> int:
    """Returns how many processes the engine has at most."""
    ranks = config.parallel.num_ranks
    processes = config.kv_transfer.num_processes if config.kv_transfer is not None else 0
    return 1 + ranks + ranks * processes


def names_of_step_makers(config: EngineConfig) -> dict[int, str]:
    """Returns those without which no step ends, by place. Transfer processes are not among them:
    the core watches these and starts them again."""
    ranks = range(config.parallel.num_ranks)
    return {CORE_PLACE: "the engine core", **{worker_place(r): f"worker {r}" for r in ranks}}

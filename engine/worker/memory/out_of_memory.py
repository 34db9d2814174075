"""A device without enough memory, with what an operator can change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.config import EngineConfig
from engine.contracts.errors import CannotStartError
from engine.kv_cache.capacity import size_setting
from engine.worker.memory.profiler import MemoryProfiler
from host.memory import format_bytes


class DeviceMemoryError(CannotStartError):
    """The device had too little memory. Names what for, what was free, and the cure."""


@contextmanager
def naming_out_of_memory(doing: str, cure: str, device: torch.device) -> Iterator[None]:
    """Raises `DeviceMemoryError` for torch's own error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise device_memory_error(doing, cure, device) from error


def device_memory_error(doing: str, cure: str, device: torch.device) -> DeviceMemoryError:
    """Returns the error with the figures of this moment."""
    memory = MemoryProfiler(device)
    return DeviceMemoryError(
        f"{device} ran out of memory while {doing}: of {format_bytes(memory.total())} this worker "
        f"holds {format_bytes(memory.in_use())}, and {format_bytes(memory.available())} are free; "
        f"{cure}"
    )


def cure_of_loading(config: EngineConfig) -> str:
    return (
        f"raise tensor_parallel_size (now {config.parallel.tensor_parallel_size}), take a smaller "
        f"model or dtype (now {config.model.dtype}), or end what else uses this device"
    )


def cure_of_largest_step(config: EngineConfig) -> str:
    limits = config.scheduler
    return (
        f"lower max_num_batched_tokens (now {limits.max_num_batched_tokens}) or max_num_seqs (now "
        f"{limits.max_num_seqs})"
    )


def cure_of_full_cache(config: EngineConfig) -> str:
    """Helps what comes after the KV cache has taken its part."""
    return f"lower {size_setting(config)}"


def cure_of_graphs(config: EngineConfig) -> str:
    return f"{cure_of_full_cache(config)}, name fewer cudagraph_capture_sizes, or set enforce_eager"

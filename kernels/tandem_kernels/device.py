"""Questions that launchers and policies ask the device.

`as_on` answers them as another GPU would, so that choices can be explained where it is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from tandem_kernels.gemm.small_m_shapes import MAX_ROWS

_HOPPER_SHARED_BYTES = 227 * 1024
_AMPLE_SHARED_BYTES = 163 * 1024
"""As much as a program of an A100 can have; of an L40S it is 99 KiB."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Holds what choices depend on.

    Attributes:
        name: As tables of tunings have it, `NVIDIA_H200`.
        capability: Compute capability.
        num_sms: Streaming multiprocessors.
        shared_bytes: Shared memory that a program can have.
    """

    name: str
    capability: tuple[int, int]
    num_sms: int
    shared_bytes: int = _HOPPER_SHARED_BYTES


KNOWN_GPUS = {
    "h100": GpuFacts("NVIDIA_H100_80GB_HBM3", (9, 0), 132),
    "h200": GpuFacts("NVIDIA_H200", (9, 0), 132),
}
"""GPUs that need not be present to be explained. Both as `torch.cuda` describes the SXM boards."""

_assumed: GpuFacts | None = None


@contextmanager
def as_on(gpu: GpuFacts | None) -> Iterator[None]:
    """Answers as on `gpu` inside the context, for every device of this process. None: as ever.
    Nothing may be launched there."""
    global _assumed
    before, _assumed = _assumed, gpu
    try:
        yield
    finally:
        _assumed = before


def gpu_facts(device: torch.device) -> GpuFacts | None:
    """Returns the facts of a device; None: it is no GPU."""
    if _assumed is not None:
        return _assumed
    return _facts_of(device) if device.type == "cuda" else None


@cache
def _facts_of(device: torch.device) -> GpuFacts:
    properties = torch.cuda.get_device_properties(device)
    return GpuFacts(
        properties.name.replace(" ", "_"),
        (properties.major, properties.minor),
        properties.multi_processor_count,
        getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block),
    )


def is_gpu(device: torch.device) -> bool:
    """Returns whether kernels of the Triton column run there."""
    return gpu_facts(device) is not None


def num_programs(device: torch.device, programs_per_sm: int) -> int:
    """Returns the size of a grid that depends on nothing but the device."""
    gpu = gpu_facts(device)
    return programs_per_sm * (2 if gpu is None else gpu.num_sms)


def gpu_names(device: torch.device) -> tuple[str, ...]:
    """Returns the names under which tables of tunings may have a GPU: its own, its family's,
    `sm_90`, and `shared_99k` if its programs can have no more; of no GPU, none."""
    return _names_of_device(device) if _assumed is None else _names_of(_assumed)


@cache
def _names_of_device(device: torch.device) -> tuple[str, ...]:
    return _names_of(_facts_of(device)) if device.type == "cuda" else ()


def _names_of(gpu: GpuFacts) -> tuple[str, ...]:
    own = gpu.name, "sm_{}{}".format(*gpu.capability)
    return own if gpu.shared_bytes >= _AMPLE_SHARED_BYTES else (*own, "shared_99k")


def gpu_name(device: torch.device) -> str:
    """Returns the GPU's name as tables of tunings have it, `NVIDIA_H200`; of no GPU, `cpu`."""
    gpu = gpu_facts(device)
    return device.type if gpu is None else gpu.name


def shared_bytes(device: torch.device) -> int:
    """Returns how much shared memory a program of a GPU can have; of no GPU, as on Hopper."""
    gpu = gpu_facts(device)
    return _HOPPER_SHARED_BYTES if gpu is None else gpu.shared_bytes


def has_ample_memory(device: torch.device) -> bool:
    """Returns whether a program can have as much shared memory as on an A100."""
    return shared_bytes(device) >= _AMPLE_SHARED_BYTES


def has_capability(device: torch.device, least: tuple[int, int]) -> bool:
    """Returns whether a GPU has at least this compute capability."""
    gpu = gpu_facts(device)
    return gpu is not None and gpu.capability >= least


def supports_pdl(device: torch.device) -> bool:
    """Returns whether a kernel may start before its predecessor has drained (Hopper and later)."""
    return has_capability(device, (9, 0))


def has_copy_engine(device: torch.device) -> bool:
    """Returns whether tensor descriptors load through the bulk copy engine (Hopper and later)."""
    return supports_pdl(device)


def has_e4m3(device: torch.device) -> bool:
    """Returns whether instructions convert numbers of that format (Ada, Hopper and later)."""
    return has_capability(device, (8, 9))


def multiplies_halves(device: torch.device) -> bool:
    """Returns whether matrix units take bfloat16, and two halves are one operand of any instruction
    (Ampere and later)."""
    return has_capability(device, (8, 0))


def has_warpgroup_mma(device: torch.device) -> bool:
    """Returns whether four warps multiply together, from shared memory (Hopper alone)."""
    gpu = gpu_facts(device)
    return gpu is not None and gpu.capability[0] == 9


_pdl_enabled = True


def enable_pdl(enabled: bool) -> None:
    """Sets whether the small kernels of a layer overlap their predecessors, too, when a step has
    few tokens. With many there is nothing to gain."""
    global _pdl_enabled
    _pdl_enabled = enabled


def uses_pdl(device: torch.device, num_tokens: int = 0) -> bool:
    """Returns whether a kernel is launched before its predecessor has drained: a small one of a
    step of this many tokens, or one to which their number makes no difference."""
    return _pdl_enabled and num_tokens <= MAX_ROWS and supports_pdl(device)

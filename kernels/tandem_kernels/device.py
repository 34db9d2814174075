"""Questions that launchers ask the device."""

from __future__ import annotations

from functools import cache

import torch

from tandem_kernels.gemm.small_m_shapes import MAX_ROWS


def num_programs(device: torch.device, programs_per_sm: int) -> int:
    """Returns the size of a grid that depends on nothing but the device."""
    if device.type != "cuda":
        return 2 * programs_per_sm
    return torch.cuda.get_device_properties(device).multi_processor_count * programs_per_sm


@cache
def gpu_name(device: torch.device) -> str:
    """Returns the GPU's name as tables of tunings have it, `NVIDIA_H200`; of no GPU, `cpu`."""
    if device.type != "cuda":
        return device.type
    return torch.cuda.get_device_name(device).replace(" ", "_")


def supports_pdl(device: torch.device) -> bool:
    """Returns whether a kernel may start before its predecessor has drained (Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def has_copy_engine(device: torch.device) -> bool:
    """Returns whether tensor descriptors load through the bulk copy engine (Hopper and later)."""
    return supports_pdl(device)


def has_e4m3(device: torch.device) -> bool:
    """Returns whether instructions convert numbers of that format (Ada, Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def multiplies_halves(device: torch.device) -> bool:
    """Returns whether matrix units take bfloat16, and two halves are one operand of any instruction
    (Ampere and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def has_warpgroup_mma(device: torch.device) -> bool:
    """Returns whether four warps multiply together, from shared memory (Hopper alone)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


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

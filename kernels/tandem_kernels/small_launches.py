"""Small kernels of a step with few tokens, one behind the other.

Each has little to do, so what it takes is its launch. A launch ahead of time (PDL) puts it in place
while the kernel in front still runs:

    kernel in front     ...─────────┐ ends
    this one      in place ─ waits ─┴─ computes ─...
    the next one         in place ─ waits ───────┴─...
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import uses_pdl


@triton.jit
def take_turn(OVERLAP: tl.constexpr) -> None:
    """Lets the next kernel into place, and waits until those in front have ended."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


def in_turn(device: torch.device, num_rows: int = 0) -> dict[str, bool]:
    """Returns how a kernel that may be in place early is launched, for a step of this many rows; 0:
    their number makes no difference."""
    overlap = uses_pdl(device, num_rows)
    return {"OVERLAP": overlap, **({"launch_pdl": True} if overlap else {})}

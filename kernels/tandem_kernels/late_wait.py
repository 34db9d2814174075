"""A wait for the kernels in front, behind what is computed without them.

The compiler moves what only later instructions need behind a wait, since it knows no reason against
it: of merging parts a quarter, 300 instructions that find a program's place. So here the wait
itself needs the numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_behind(numbers: tl.tensor) -> None:
    """Waits until the kernels in front have ended, once `numbers` are there: int32, none of which
    is the smallest that there is."""
    tl.inline_asm_elementwise(
        "{ .reg .pred known; setp.ne.s32 known, $1, 0x80000000;"
        " @known griddepcontrol.wait; mov.b32 $0, $1; }",
        "=r,r",
        [numbers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )

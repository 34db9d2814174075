"""Notices kernels that are compiled while something waits for a step.

1. `start()` when warm-up has ended: from now on no kernel should be new
2. each kernel that is compiled nevertheless is logged and listed in `late`: it took a second
   or more of waiting time, and warm-up should have known its arguments
3. `stop()`
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


class CompileGuard:
    """Records what was compiled since `start` in `late`, by name and arguments."""

    def __init__(self) -> None:
        self.late: list[str] = []
        self._before: Any = None

    def start(self) -> None:
        """Imports triton."""
        from triton import knobs

        self._before = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self._compiled

    def stop(self) -> None:
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = self._before

    def _compiled(self, **details: Any) -> bool | None:
        """Records a compilation as Triton's hook; what it returns is ignored."""
        name = described(details)
        self.late.append(name)
        logger.warning("a kernel was compiled in the middle of serving: %s", name)
        return None if self._before is None else bool(self._before(**details))


def described(details: dict[str, Any]) -> str:
    """Returns a kernel's name with all that its compilation depends on: types of arguments, `:16`
    behind those that are multiples of 16, and constants. `details` are those of Triton's hook;
    its own text leaves them out."""
    function, compiled = details["fn"], details["compile"]
    constants = {str(of): value for of, value in compiled["constants"].items()}
    multiples = {str(of) for config in compiled["configs"] for of, known in config.items() if known}
    arguments = []
    for index, (name, kind) in enumerate(compiled["signature"].items()):
        at = str((index,))
        if at in constants:
            arguments.append(f"{name}={constants[at]}")
        else:
            arguments.append(f"{name}: {kind}" + ":16" * (at in multiples))
    return f"{function.name}({', '.join(arguments)}), {compiled['num_warps']} warps"

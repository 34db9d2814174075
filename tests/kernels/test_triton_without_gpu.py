"""The Triton column on a machine without a GPU: interpreted, and compiled ahead of time.

Both need a process of their own: Triton reads TRITON_INTERPRET when a kernel is defined.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).resolve().parent


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, *command],
        env={**kept, **environment},
        cwd=HERE.parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _output(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate()
    assert process.returncode == 0, out[-8000:]
    return out


def test_kernels_in_the_interpreter() -> None:
    arguments = ["-q", "-p", "no:cacheprovider", str(HERE / "interpreted_kernels.py")]
    out = _output(_start(["-m", "pytest", *arguments], {"TRITON_INTERPRET": "1"}))
    assert " passed" in out and "skipped" not in out, out


@pytest.mark.timeout(400)
def test_kernels_compile_ahead_of_time() -> None:
    """For Ampere and Hopper, side by side."""
    script = str(HERE / "compile_kernels.py")
    processes = [_start([script, capability], {}) for capability in ("80", "90")]
    for out in map(_output, processes):
        for kernel in ("decode_attention_kernel", "prefill_attention_kernel", "weigh_kernel"):
            assert kernel in out

"""Programs that use Triton in a process of their own: it reads TRITON_INTERPRET when a kernel is
defined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from host.termination import bound

ROOT = Path(__file__).resolve().parents[2]


def run_triton(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of this Python, whose errors are part of its output. It ends with the test
    that waits for it, however that ends."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        bound([sys.executable, *command]),
        env={**kept, **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

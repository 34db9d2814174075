"""Runs Mooncake Store's processes for tests, and scripts against them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench.kv.mooncake import Mooncake, mooncake, package, python_path

__all__ = ["Mooncake", "mooncake", "needs_mooncake", "python_path", "run_client"]

_TIMEOUT_S = 60.0

needs_mooncake = pytest.mark.skipif(
    package() is None, reason="Mooncake is not installed: make mooncake"
)


def run_client(store: Mooncake, script: str) -> str:
    """Returns what a client prints that runs `script` with `store`, which is connected."""
    head = (
        "from mooncake.store import MooncakeDistributedStore\n"
        "store = MooncakeDistributedStore()\n"
        "assert store.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 16 << 20, 'tcp', '', "
        f"'127.0.0.1:{store.master_port}') == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + script + "\nstore.close()"],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True, text=True, check=False, timeout=_TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout

"""Shared by all tests: one torch thread, no GPU tests without a GPU, one demo checkpoint path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent


def _num_cuda_devices() -> int:
    import torch

    return torch.cuda.device_count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [
        i for i in items if i.get_closest_marker("gpu") or i.get_closest_marker("multi_gpu")
    ]
    if not gpu_items:
        return
    devices = _num_cuda_devices()
    for item in gpu_items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1
        if devices < needed:
            item.add_marker(
                pytest.mark.skip(reason=f"needs {needed} CUDA device(s), has {devices}")
            )


@pytest.fixture(scope="session")
def demo_checkpoint() -> Path:
    """The checkpoint that ships with the repository."""
    return ROOT / "cli" / "demo_checkpoint"

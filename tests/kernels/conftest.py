"""Kernel tests share one set of independent oracles: `import kernel_oracle`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem_kernels.new_paths import take_new_paths

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture
def wide_windows() -> Iterator[None]:
    take_new_paths(["wide-windows"])
    yield
    take_new_paths([])


@pytest.fixture
def late_kernels() -> Iterator[None]:
    take_new_paths(["late-norm", "late-route"])
    yield
    take_new_paths([])

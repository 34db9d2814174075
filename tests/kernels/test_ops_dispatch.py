"""The dispatch table: CPU needs no triton, and both columns have one signature."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from tandem_kernels import ops

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from tandem_kernels import ops
import engine.executor.worker_proc
assert "huggingface_hub" not in sys.modules
out = ops.rms_norm(torch.randn(2, 8), torch.ones(8), 1e-5)
assert out.isfinite().all()
"""


def test_cpu_works_where_triton_is_missing() -> None:
    """A worker does: what it needs on a GPU alone, and what few need at all, is imported when it is
    needed."""
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True, timeout=110)


def test_both_columns_have_one_signature() -> None:
    pytest.importorskip("triton")
    columns = {name: op for name, op in vars(ops).items() if isinstance(op, ops.Op)}
    assert len(columns) >= 15
    for name, op in columns.items():
        assert op.reference.__name__ == name
        kernel = inspect.signature(op.kernel).parameters.values()
        reference = inspect.signature(op.reference).parameters.values()
        assert [(p.name, p.default) for p in kernel] == [(p.name, p.default) for p in reference]

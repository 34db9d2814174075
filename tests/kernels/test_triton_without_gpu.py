"""Kernels in Triton's interpreter, on a machine without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kernels.triton_program import run_triton

pytest.importorskip("triton")

HERE = Path(__file__).resolve().parent
PARTS = ["layers", "attention", "decodes", "sparse", "rows", "experts", "sampling"]


@pytest.fixture(scope="module")
def interpreted() -> str:
    """Returns what pytest says of all parts: they share a process."""
    parts = [str(HERE / f"interpreted_{part}.py") for part in PARTS]
    arguments = ["-v", "--tb=short", "-p", "no:cacheprovider", *parts]
    done = run_triton("-m", "pytest", *arguments, TRITON_INTERPRET="1")
    told = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED
    assert done.returncode in told, done.stdout[-8000:]
    return done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", PARTS)
def test_kernels_in_the_interpreter(part: str, interpreted: str) -> None:
    ends = re.findall(rf"interpreted_{part}\.py::.* (\w+) +\[ *\d+%\]$", interpreted, re.M)
    assert ends and set(ends) == {"PASSED"}, interpreted[-8000:]

"""The Triton column on a machine without a GPU: interpreted, and compiled ahead of time.

Both need a process of their own: Triton reads TRITON_INTERPRET when a kernel is defined.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).resolve().parent
PARTS = ["layers", "attention", "sparse", "rows", "experts", "sampling"]
HOPPER_ALONE = {
    "gather_candidates_kernel",
    "index_scores_ahead_kernel",
    "few_row_gemm_kernel",
    "few_row_qkv_kernel",
    "normed_router_kernel",
    "head_gemm_kernel",
    "latent_decode_ahead_kernel",
    "latent_decode_few_kernel",
    "sparse_ahead_kernel",
    "sparse_pieces_kernel",
    "window_rows_ahead_kernel",
    "fp4_experts_ahead_kernel",
    "fp4_one_row_down_kernel",
    "fp4_one_row_gate_up_kernel",
    "lora_gemm_kernel",
    "fused_gate_up_kernel",
    "fused_qkv_kernel",
    "fp8_small_m_kernel",
    "fp8_few_row_kernel",
    "fp8_dequantise_kernel",
    "int8_gemm_kernel",
    "fp8_expert_gemm_kernel",
    "fp8_experts_ahead_kernel",
    "fp8_pair_gemm_kernel",
    "quantise_to_places_kernel",
    "sorted_tiles_kernel",
    "quantise_fp8_kernel",
    "rms_norm_fp8_kernel",
    "scale_product_kernel",
    "silu_and_mul_fp8_kernel",
}


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


@pytest.fixture(scope="module")
def interpreted() -> str:
    """Returns what pytest says of all parts: they share a process."""
    parts = [str(HERE / f"interpreted_{part}.py") for part in PARTS]
    arguments = ["-v", "--tb=short", "-p", "no:cacheprovider", *parts]
    with _start(["-m", "pytest", *arguments], {"TRITON_INTERPRET": "1"}) as process:
        try:
            out, _ = process.communicate()
        finally:
            process.kill()
    assert process.returncode in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), out[-8000:]
    return out


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", PARTS)
def test_kernels_in_the_interpreter(part: str, interpreted: str) -> None:
    ends = re.findall(rf"interpreted_{part}\.py::.* (\w+) +\[ *\d+%\]$", interpreted, re.M)
    assert ends and set(ends) == {"PASSED"}, interpreted[-8000:]


@pytest.mark.timeout(400)
def test_kernels_compile_ahead_of_time() -> None:
    """Kernels compile for Ampere and Hopper."""
    # Numbers of lines change no instruction, and take time.
    environment = {"TRITON_DISABLE_LINE_INFO": "1"}
    out = _output(_start([str(HERE / "compile_kernels.py"), "80", "90"], environment))
    # Others are warnings, as that a GPU without tables takes those of sm_90.
    lines = [line.split(" | ")[:2] for line in out.splitlines() if " | " in line]
    compiled = {(capability, name.split()[0]) for capability, name in lines}
    for kernel in _defined_kernels():
        assert ("90", kernel) in compiled, kernel
        assert ("80", kernel) in compiled or kernel in HOPPER_ALONE, kernel


def _defined_kernels() -> list[str]:
    """Returns the names of all functions that something launches."""
    folder = HERE.parent.parent / "kernels" / "tandem_kernels"
    sources = [path.read_text() for path in folder.rglob("*.py")]
    return [name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.M)]

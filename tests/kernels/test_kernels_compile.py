"""Kernels are compiled on a machine without a GPU, for Ampere and Hopper."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kernels.triton_program import run_triton

pytest.importorskip("triton")

HERE = Path(__file__).resolve().parent
HOPPER_ALONE = {
    "gather_candidates_kernel",
    "index_scores_ahead_kernel",
    "few_row_gemm_kernel",
    "few_row_qkv_kernel",
    "small_m_qkv_kernel",
    "few_row_warp_kernel",
    "few_row_warp_qkv_kernel",
    "normed_router_kernel",
    "head_gemm_kernel",
    "latent_decode_ahead_kernel",
    "latent_decode_few_kernel",
    "sparse_ahead_kernel",
    "sparse_pieces_kernel",
    "window_rows_ahead_kernel",
    "fp4_experts_ahead_kernel",
    "fp4_few_row_gate_up_kernel",
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


# Minutes of processors, where nothing is compiled yet. The program ends when one kernel hangs.
@pytest.mark.timeout(1800)
def test_kernels_compile_ahead_of_time() -> None:
    # Numbers of lines change no instruction, and take time.
    program = str(HERE / "compile_kernels.py")
    done = run_triton(program, "80", "90", TRITON_DISABLE_LINE_INFO="1")
    compiled, others = set(), []
    for line in done.stdout.splitlines():
        if cells := re.match(r"(80|90) \| (\w+) .*\| \d+$", line):
            compiled.add(cells.groups())
        else:
            others.append(line)
    assert done.returncode == 0, "\n".join(others)[-8000:]
    for kernel in _defined_kernels():
        assert ("90", kernel) in compiled, kernel
        assert ("80", kernel) in compiled or kernel in HOPPER_ALONE, kernel


def _defined_kernels() -> list[str]:
    """Returns the names of all functions that something launches."""
    folder = HERE.parent.parent / "kernels" / "tandem_kernels"
    sources = [path.read_text() for path in folder.rglob("*.py")]
    return [name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.M)]

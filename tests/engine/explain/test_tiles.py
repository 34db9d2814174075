"""Kernels and tiles of single launches, as the tables of an H200 have them."""

from __future__ import annotations

import pytest
import torch

from engine.explain.launches import Launch
from engine.explain.tiles import describe
from tandem_kernels.device import KNOWN_GPUS, as_on
from tandem_kernels.tunings.table import asked_choices

H200 = KNOWN_GPUS["h200"]


def _meta(*size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("name", "arguments", "kernel", "table"),
    [
        ("fp8_gemm", (4096, 4096, (32, 32)), "fp8_few_row_kernel", "fp8_registers row 7"),
        ("fp8_gate_up", (8192, 4096, (8192,)), "fp8_small_m_kernel", "fp8_few row 6: gated = true"),
        ("int8_gate_up", (8192, 4096, (8192,)), "fp8_small_m_kernel", "fp8_few row 6"),
        ("int4_gemm", (4096, 1024, (1,)), "int4_gemm_kernel", "int4 row 1: num_rows <= 8"),
        ("fp4_gate_up", (128, 64, ()), "fp4_gemm_kernel", "fp4 row 1: num_rows <= 8, gated = true"),
    ],
)
def test_gemms_of_few_bits_say_their_row(
    name: str, arguments: tuple[int, int, tuple[int, ...]], kernel: str, table: str
) -> None:
    """A step of four rows."""
    outputs, columns, scales = arguments
    rows, weight = _meta(4, 4096, dtype=torch.bfloat16), _meta(outputs, columns)
    given: tuple[torch.Tensor, ...] = (rows, weight, _meta(*scales))
    if "8" in name:
        given = (rows, _meta(4), weight, _meta(*scales))
    with as_on(H200), asked_choices() as asked:
        found, tile = describe(Launch(name, "gemm", "", given))
    assert found == kernel and "warps" in tile
    assert str(asked[-1]).startswith(f"sm_90/{table}")

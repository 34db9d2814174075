"""Tests 4-bit weights in plain torch against their definition, and their packed form."""

from __future__ import annotations

import int4_checks as check
import pytest
import torch

from tandem_kernels import ops
from tandem_kernels.gemm.int4_packing import (
    group_size_for,
    pack_groups,
    pack_numbers,
    packed_group_size,
    padded_inputs,
    unpack_numbers,
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(16, 512, 128), (24, 320, 64), (8, 96, 32)])
def test_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    *matrix, group_size = shape
    check.int4_dequantise(ops.int4_dequantise, (matrix[0], matrix[1]), group_size, dtype)
    check.int4_gemm(ops.int4_gemm, ops.int4_gate_up, (3, matrix[0], matrix[1]), group_size, dtype)


def test_a_row_has_the_same_bits_in_any_company() -> None:
    check.int4_in_fixed_order(ops.int4_gemm, (21, 32, 256), torch.float32)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_packed_numbers_come_back_and_what_pads_them_weighs_nothing(group_size: int) -> None:
    num_inputs = 3 * group_size
    numbers = torch.randint(0, 16, (5, num_inputs))
    packed = pack_numbers(numbers, group_size)
    assert packed.shape == (5, padded_inputs(num_inputs, group_size) // 4)
    assert torch.equal(unpack_numbers(packed, group_size)[:, :num_inputs], numbers)
    ones = torch.ones(5, 3)
    groups = pack_groups(ones, 8 * ones, num_inputs, group_size)
    assert packed_group_size(packed, groups) == group_size
    assert groups[3:].eq(0).all()


def test_two_neighbouring_inputs_lie_beside_each_other() -> None:
    numbers = torch.arange(256).reshape(1, 256) // 64 * 4 + torch.arange(256) % 4
    words = pack_numbers(numbers, 128).view(torch.int32)
    assert words[0, 0] == 0xD951C840 - 2**32


def test_groups_are_cut_where_ranks_are() -> None:
    assert group_size_for(128, 4096) == 128
    assert group_size_for(4096, 4096) == 128
    assert group_size_for(128, 2752) == 64
    assert group_size_for(64, 96) == 32
    assert group_size_for(128, 1000) is None
    assert group_size_for(48, 96) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts(dtype: torch.dtype) -> None:
    check.int4_experts(ops.int4_experts, (13, 3, 8, 96, 64), 32, dtype)

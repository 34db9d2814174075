"""Says from and up to how many rows each way to compute a GEMM is the fastest on a device
(`tunings/*/gemm_thresholds.json`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem_kernels.tunings.table import plain_table


@dataclass(frozen=True, slots=True)
class GemmThresholds:
    """Holds numbers of rows, which are the tokens of a step.

    Attributes:
        small_m_rows, few_rows: The most: with more, the library is faster.
        small_m_heads: The most that become heads in one launch: with more, the library is faster by
            more than rotating them takes.
        wide_rows: The most of layers whose tiles are about as many as SMs.
        fused_gate_up_rows: The fewest: with fewer, there are too few tiles for all SMs.
        fused_qkv_rows: The fewest: with fewer, tiles fill the last wave of SMs too badly.
        residual_rows: The fewest: with fewer, small kernels take little of a step.
        int4_rows, fp4_rows: The most: with more, writing the weights out in half precision costs
            less.
        beside_rows: The most: with more, either GEMM keeps all SMs busy.
        register_rows: The most that `few_row_gemm` and its like multiply in registers: with more,
            products take more time than the weights' bytes.
        many_outputs, rows_of_many: The most rows of layers with more outputs than `many_outputs`:
            with more rows, these keep the library busy.
        routed_rows: The most whose experts those choose that multiply: with more, a launch for the
            choice costs less.
        normed_rows: The most whose norm a router computes: with more, matrix units cost less.
    """

    small_m_rows: int
    wide_rows: int
    small_m_heads: int
    few_rows: int
    fused_gate_up_rows: int
    fused_qkv_rows: int
    residual_rows: int
    int4_rows: int
    fp4_rows: int
    beside_rows: int
    register_rows: int
    many_outputs: int
    rows_of_many: int
    routed_rows: int
    normed_rows: int


_TABLE = plain_table("gemm_thresholds", GemmThresholds, ())


def gemm_thresholds(device: torch.device) -> GemmThresholds:
    """Returns what was measured for a device; one that is no GPU has no use for it."""
    return _TABLE.choose(device)

"""The thresholds between ways to compute a GEMM, chosen once for a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import DeviceConfig
from tandem_kernels.device import has_warpgroup_mma, is_gpu, multiplies_halves, supports_pdl
from tandem_kernels.gemm import few_row_warp_shapes
from tandem_kernels.gemm.gemm_thresholds import gemm_thresholds

_INT8_ROWS = 64
"""The largest size: the kernel has one tile of all rows."""


@dataclass(frozen=True, slots=True)
class GemmPolicy:
    """Thresholds are in rows, which are the tokens of a step.

    Attributes:
        deterministic: A row of a GEMM does not depend on the others. Rules out all else.
        small_m_rows: Column layers compute at most this many rows by kernels of our own.
        small_m_wide_rows: So do, at most this many, all layers whose tiles fill the SMs once
            (`small_m.fills_once`), row layers among them.
        small_m_heads: At most this many rows become rotated heads, and keys and values in the
            cache, in one launch of them; 0: never.
        fused_gate_up_rows: From this many rows on, gate·up and its activation are one GEMM of our
            own; 0: never.
        fused_qkv_rows: From this many rows on, queries, keys and values are rotated and written to
            the cache by the GEMM that computes them, one of our own; 0: never.
        residual_rows: From this many rows on, row layers add to the residual stream in the GEMM; 0:
            never.
        int4_rows: Packed 4-bit weights are multiplied by at most this many rows; for more they are
            written out in half precision first. 0: they are as they are loaded.
        fp4_rows: The same of four-bit floats.
        beside_rows: A shared expert of at most this many rows is computed beside the others, on a
            stream of its own; 0: never.
        few_rows: Linear layers and routers that no kernel above serves compute at most this many
            rows by our own kernel for any size, some with the convolution behind them; 0: never.
        adds_few_rows: And row layers add them to the residual stream themselves.
        few_row_heads: Of layers that no kernel of their own serves either, at most this many rows
            become rotated heads, and keys and values in the cache, in one launch; of few of them
            (`GemmThresholds.register_rows`) the norm in front included; 0: never.
        fused_router_rows: Mixtures of experts compute at most this many rows with the norm in their
            router; fewer (`GemmThresholds.routed_rows`), where router and method can, with the
            choice in their first GEMM, which adds to the residual stream, or with a shared expert
            in their GEMMs; 0: never.
        shared_residual_rows: From this many rows on, row layers of the first of two ranks do,
            before the ranks' parts are summed; 0: never. Not of more ranks: each rounds the stream
            again.
        fp8: GEMMs take FP8 weights and inputs; else weights are dequantised as they are loaded.
        int8: The same of INT8.
        int8_rows: INT8 weights beside inputs in half precision are multiplied by at most this many
            rows; for more they are written out first. 0: they are as they are loaded.
    """

    deterministic: bool = False
    small_m_rows: int = 0
    fused_gate_up_rows: int = 0
    residual_rows: int = 0
    int4_rows: int = 0
    fp8: bool = False
    beside_rows: int = 0
    few_rows: int = 0
    adds_few_rows: bool = False
    shared_residual_rows: int = 0
    fused_router_rows: int = 0
    few_row_heads: int = 0
    fused_qkv_rows: int = 0
    int8: bool = False
    int8_rows: int = 0
    fp4_rows: int = 0
    small_m_wide_rows: int = 0
    small_m_heads: int = 0

    @classmethod
    def choose(
        cls,
        config: DeviceConfig,
        device: torch.device,
        tp_size: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> GemmPolicy:
        """Returns the fastest policy of `device` that `config` allows, for a model in `dtype`."""
        rows = gemm_thresholds(device)
        int4 = config.allows("int4-gemm") and multiplies_halves(device) and dtype.itemsize == 2
        int4_rows, fp4_rows = (rows.int4_rows, rows.fp4_rows) if int4 else (0, 0)
        int8 = config.allows("int8-gemm") and multiplies_halves(device) and dtype.itemsize == 2
        if config.deterministic:
            return cls(deterministic=True, int4_rows=int4_rows, fp4_rows=fp4_rows)
        small_m = config.allows("small-m-gemm") and supports_pdl(device)
        gate_up = config.allows("fused-gate-up") and has_warpgroup_mma(device)
        qkv = config.allows("fused-qkv") and has_warpgroup_mma(device)
        beside = config.allows("side-stream") and is_gpu(device)
        residual = config.allows("residual-gemm") and is_gpu(device)
        few_rows = config.allows("few-row-gemm") and supports_pdl(device)
        heads = config.allows("few-row-qkv") and supports_pdl(device)
        fused_router = config.allows("fused-router") and supports_pdl(device)
        return cls(
            small_m_rows=rows.small_m_rows if small_m else 0,
            small_m_wide_rows=rows.wide_rows if small_m else 0,
            small_m_heads=rows.small_m_heads if small_m else 0,
            fused_gate_up_rows=rows.fused_gate_up_rows if gate_up else 0,
            fused_qkv_rows=rows.fused_qkv_rows if qkv else 0,
            residual_rows=rows.residual_rows if residual and tp_size == 1 else 0,
            shared_residual_rows=rows.residual_rows if residual and tp_size == 2 else 0,
            int4_rows=int4_rows,
            fp4_rows=fp4_rows,
            beside_rows=rows.beside_rows if beside else 0,
            few_rows=rows.few_rows if few_rows else 0,
            adds_few_rows=few_rows and tp_size == 1,
            few_row_heads=few_row_warp_shapes.MOST_ROWS if heads else 0,
            fused_router_rows=rows.normed_rows if fused_router and tp_size == 1 else 0,
            int8=int8 and _multiplies_bytes(device, dtype),
            int8_rows=_INT8_ROWS if int8 else 0,
            fp8=config.allows("fp8-gemm") and _multiplies_bytes(device, dtype),
        )


def _multiplies_bytes(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether kernels and library multiply numbers of 8 bits; a product before its scales
    exceeds half precision of any other kind."""
    return has_warpgroup_mma(device) and dtype == torch.bfloat16

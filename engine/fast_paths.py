"""Names of fast paths on a GPU, which a setting turns off."""

from __future__ import annotations

from typing import Literal

FastPath = Literal[
    "few-row-gemm",
    "few-row-qkv",
    "fp8-gemm",
    "fused-gate-up",
    "fused-qkv",
    "fused-router",
    "int4-gemm",
    "int8-gemm",
    "late-steps",
    "lora-gemm",
    "pdl",
    "precompile",
    "prompt-graphs",
    "residual-gemm",
    "sampled-rows",
    "side-stream",
    "small-m-gemm",
]
"""Names what to do without, should one of them be suspected:

few-row-gemm    linear layers and routers of few rows by our own kernel for any size, where
                `small-m-gemm` does not take their sizes; and projections of up to four rows with
                the short convolution behind them
few-row-qkv     up to eight rows of such sizes: queries, keys and values, their rotation and the
                write into the cache in one launch; of up to four rows the norm, too
fp8-gemm        FP8 weights of linear layers that stay so; without, they are dequantised as they are
                loaded
fused-gate-up   gate·up of many rows by our own kernel, activation included
fused-qkv       queries, keys and values of many rows are rotated, and written to the cache, by the
                kernel of our own that computes them
fused-router    mixtures of experts of few rows: the norm in the router's launch, the choice of
                experts in that of their first GEMM, and the second adds to the residual stream; or
                a shared expert in the launches of the others
int4-gemm       4-bit weights that stay packed; without, they are dequantised as they are loaded
int8-gemm       INT8 weights that stay so; without, they are dequantised as they are loaded
late-steps      the next step goes out shortly before the one in front ends, so that a request that
                comes meanwhile is in it; without, as early as there is room for it
lora-gemm       adapters of up to 16 rows in the launch of their layer, where its weights are plain
pdl             small kernels that start before the one before has ended (programmatic dependent
                launch)
precompile      kernels are compiled by a process of their own, on all cores, while weights are
                loaded; without, by the first step that needs them
prompt-graphs   CUDA graphs of steps with prompts
residual-gemm   GEMMs of many rows that add to the residual stream themselves
sampled-rows    behind its attention, the last layer computes no tokens of prompts but those behind
                which the next one is chosen
side-stream     shared experts beside the others, adapters of few rows beside their layer
small-m-gemm    GEMMs of few rows by our own kernels; and of up to 64 rows queries, keys and values,
                their rotation and the write into the cache in one launch
"""

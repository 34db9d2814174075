"""Names of fast paths on a GPU, which settings turn off and on."""

from __future__ import annotations

from typing import Literal

FastPath = Literal[
    "fp8-gemm",
    "fused-gate-up",
    "int4-gemm",
    "pdl",
    "prompt-graphs",
    "residual-gemm",
    "side-stream",
    "small-m-gemm",
]
"""Names what to do without, should one of them be suspected:

fp8-gemm        FP8 weights of linear layers that stay so; without, they are dequantised as they are
                loaded
fused-gate-up   gate·up of many rows by our own kernel, activation included
int4-gemm       4-bit weights that stay packed; without, they are dequantised as they are loaded
pdl             small kernels that start before the one before has ended (programmatic dependent
                launch)
prompt-graphs   CUDA graphs of steps with short prompts
residual-gemm   GEMMs of many rows that add to the residual stream themselves
side-stream     shared experts beside the others
small-m-gemm    GEMMs of few rows by our own kernels
"""
NewFastPath = Literal[
    "few-row-gemm", "finer-prompt-graphs", "long-prompt-graphs", "lora-beside", "lora-few-rows"
]
"""Names fast paths that no GPU has timed yet, so that none is taken unless asked for:

few-row-gemm          linear layers and routers of few rows by our own kernel where `small-m-gemm`
                      does not serve them
finer-prompt-graphs   CUDA graphs of prompts whose sizes are a tile of rows or two apart, so that
                      less of a step is padding
long-prompt-graphs    CUDA graphs of prompts of up to 2048 tokens for all models, not for those of
                      many launches alone
lora-beside           with `lora-few-rows`: adapters' first half beside the layer's GEMM
lora-few-rows         adapters of few rows by fewer programs, activation included
"""

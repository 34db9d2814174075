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
side-stream     shared experts beside the others, adapters of few rows beside their layer
small-m-gemm    GEMMs of few rows by our own kernels
"""
NewFastPath = Literal[
    "few-row-gemm",
    "group-writes",
    "late-norm",
    "late-route",
    "lora-one-launch",
    "overlapped-sums",
    "sampled-rows",
    "sharded-sampling",
    "wide-rope",
    "wide-windows",
]
"""Names fast paths that are not taken unless asked for, since no GPU has timed them in whole steps,
or one has and found too little (docs/experiments.md):

few-row-gemm          linear layers and routers of few rows by our own kernel where `small-m-gemm`
                      does not serve them
group-writes          data-parallel groups exchange tokens by writes into each other's memory
late-norm, late-route norms and routers of few tokens let the next kernel begin when the ones in
                      front have ended, so that its programs find all SMs empty
lora-one-launch       adapters of up to 16 rows in the launch of their layer
overlapped-sums       two ranks sum some rows of long steps while they multiply others
sampled-rows          behind its attention, the last layer computes no tokens of prompts but those
                      behind which the next one is chosen
sharded-sampling      ranks that share a vocabulary gather no logits for log probabilities, beams,
                      penalties, biases and grammars
wide-rope             programs that rotate a prompt's heads take 32 of them, not 8
wide-windows          decodes walk a small window in one or two tiles
"""

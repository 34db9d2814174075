"""The variants that `bench.engine.step_variants` tries, and how one is put in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor

from engine.layers.gemm_policy import GemmPolicy
from engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from engine.layers.mlp import GatedMLP
from engine.layers.residual import ResidualStream
from engine.models.llama import LlamaForCausalLM
from tandem_kernels import device
from tandem_kernels.attention import decode_attention, prefill_attention
from tandem_kernels.attention.decode_tuning import DecodeTuning
from tandem_kernels.attention.prefill_tuning import PrefillTuning
from tandem_kernels.gemm import small_m_gemm
from tandem_kernels.gemm.small_m_gemm import SmallMTuning

DECODE_CASES = (
    (16, 1088), (1, 1088), (64, 1088), (256, 1088), (4, 1088), (8, 1088), (32, 1088), (32, 8192),
)  # fmt: skip
"""Requests, and the context of each."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to compute. None leaves a part as it is. `library`: no GEMMs by kernels of ours.
    `residual_rows`: rows from which row layers add to the residual; `gate_up_rows`: those from
    which gate·up and its activation are one GEMM; `mlp_rows`: rows that an MLP computes at a time;
    `qkv_rows`: those from which queries, keys and values are rotated and cached by their GEMM;
    `blas`: the library of GEMMs; `long_pdl`: small kernels start early in long steps, too.
    """

    name: str
    decode: DecodeTuning | None = None
    plain: SmallMTuning | None = None
    gated: SmallMTuning | None = None
    prefill: PrefillTuning | None = None
    library: bool = False
    pdl: bool = True
    deterministic: bool = False
    residual_rows: int | None = None
    gate_up_rows: int | None = None
    mlp_rows: int | None = None
    qkv_rows: int | None = None
    blas: str | None = None
    long_pdl: bool = False


_NEVER = 0
_ALWAYS = 1
_ANY_ROWS = 1 << 30

_PREFILL = [
    (128, 64, 4, 4), (128, 64, 4, 3), (128, 64, 4, 5), (64, 64, 4, 3), (128, 64, 8, 5),
    (128, 128, 8, 5),
]  # fmt: skip
"""Rows, tile, warps, stages."""

_DECODE = [
    (64, 4, 5, 1), (64, 2, 3, 4), (32, 2, 5, 4), (64, 4, 3, 3), (128, 4, 3, 2), (64, 4, 5, 2),
]  # fmt: skip
"""Tile, warps, stages, programs on an SM."""

_FP8_DECODE = [
    (64, 2, 5, 4), (64, 2, 3, 4), (64, 2, 7, 4), (64, 2, 5, 6), (128, 4, 3, 3), (128, 4, 5, 2),
    (128, 4, 3, 2), (64, 4, 5, 3), (64, 4, 3, 4), (64, 4, 7, 2), (64, 4, 7, 1), (32, 2, 7, 4),
    (32, 4, 5, 4), (128, 8, 5, 2),
]  # fmt: skip
"""The same over an FP8 cache, where a tile has half the bytes."""

_PLAIN = [(64, 128, 4, 5), (32, 256, 4, 5), (32, 128, 4, 8)]
_GATED = [(64, 128, 8, 5), (32, 128, 4, 5), (64, 128, 4, 4)]
"""Outputs, depth, warps, stages."""


def decode_variants() -> list[Variant]:
    return [Variant(f"decode {given}", decode=DecodeTuning(*given)) for given in _DECODE]


def fp8_decode_variants() -> list[Variant]:
    return [Variant(f"decode {given}", decode=DecodeTuning(*given)) for given in _FP8_DECODE]


def prefill_variants() -> list[Variant]:
    return [Variant(f"triton {given}", prefill=PrefillTuning(*given)) for given in _PREFILL]


def small_m_variants() -> list[Variant]:
    plain = [Variant(f"qkv {given}", plain=SmallMTuning(*given)) for given in _PLAIN]
    gated = [Variant(f"gate_up {given}", gated=SmallMTuning(*given)) for given in _GATED]
    return plain + gated


def whole_steps() -> list[Variant]:
    """Lists other ways for everything at once."""
    return [
        Variant("GEMMs by the library", library=True),
        Variant("GEMMs by the library, no PDL", library=True, pdl=False),
        Variant("no PDL", pdl=False),
        Variant("deterministic", deterministic=True),
        Variant("present again"),
    ]


def long_prompt_variants() -> list[Variant]:
    """Lists variants of steps with thousands of tokens."""
    return [
        Variant("present"),
        Variant("norms add", residual_rows=_NEVER),
        Variant("activation apart", gate_up_rows=_NEVER),
        Variant("activation in the GEMM", gate_up_rows=_ALWAYS),
        Variant("rotation apart", qkv_rows=_NEVER),
        Variant("MLP by 4096", residual_rows=_ALWAYS, mlp_rows=4096),
        Variant("cuBLASLt", blas="cublaslt"),
        Variant("PDL", long_pdl=True),
    ]


@contextmanager
def applied(variant: Variant, model: LlamaForCausalLM, present: GemmPolicy) -> Iterator[None]:
    """Makes the model, which computes as `present` says, compute this way until the end of the
    block.
    """
    own = small_m_gemm.small_m_tuning
    tunings = {
        (small_m_gemm, "small_m_tuning"): lambda gated: (
            (variant.gated if gated else variant.plain) or own(gated)
        ),
        (decode_attention, "decode_tuning"): lambda *_: variant.decode,
        (prefill_attention, "prefill_tuning"): lambda *_: variant.prefill,
    }
    chosen = (variant.plain or variant.gated, variant.decode, variant.prefill)
    device.enable_pdl(variant.pdl)
    _use(model, _policy(variant, present))
    try:
        with ExitStack() as patches:
            for (module, name), tuning in zip(tunings, chosen, strict=True):
                if tuning is not None:
                    patches.enter_context(patch.object(module, name, tunings[module, name]))
            if variant.blas is not None:
                torch.backends.cuda.preferred_blas_library(variant.blas)
            if variant.long_pdl:
                patches.enter_context(patch.object(device, "MAX_ROWS", _ANY_ROWS))
            if variant.mlp_rows is not None:
                by_parts = _mlp_by_parts(variant.mlp_rows)
                patches.enter_context(patch.object(GatedMLP, "forward", by_parts))
            yield
    finally:
        device.enable_pdl(True)
        if variant.blas is not None:
            torch.backends.cuda.preferred_blas_library("default")
        _use(model, present)


def _policy(variant: Variant, present: GemmPolicy) -> GemmPolicy:
    if variant.deterministic:
        return GemmPolicy(deterministic=True)
    policy = present
    if variant.library:
        policy = replace(present, small_m_rows=0, fused_gate_up_rows=0, fused_qkv_rows=0)
    if variant.gate_up_rows is not None:
        policy = replace(policy, fused_gate_up_rows=variant.gate_up_rows)
    if variant.residual_rows is not None:
        policy = replace(policy, residual_rows=variant.residual_rows)
    if variant.qkv_rows is not None:
        policy = replace(policy, fused_qkv_rows=variant.qkv_rows)
    return policy


def _use(model: LlamaForCausalLM, policy: GemmPolicy) -> None:
    for layer in model.modules():
        if isinstance(layer, MergedColumnParallelLinear | RowParallelLinear):
            layer.method = layer.choose_method(policy)
    model.lm_head.deterministic = policy.deterministic


def _mlp_by_parts(rows: int) -> Callable[[GatedMLP, Tensor, ResidualStream], None]:
    """Computes the MLP in parts: what lies between its GEMMs stays in the cache when there is
    little of it.
    """

    def forward(self: GatedMLP, x: Tensor, stream: ResidualStream) -> None:
        for part, to in zip(x.split(rows), stream.sum.split(rows), strict=True):
            self.down_proj.add_to(ResidualStream(to), self.gate_up_proj(part))

    return forward

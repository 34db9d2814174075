"""Experts in four-bit floats, of few rows, from the router's logits to the residual stream, in two
launches: the choice with gate·up of each (token, expert) pair, and down, whose sums are added to
the stream. A row alone has kernels of its own on Hopper (`one_row`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.device import gpu_name
from tandem_kernels.elementwise.gate_form import GateForm
from tandem_kernels.experts.expert_tuning import ExpertShape
from tandem_kernels.experts.fp4.one_row.experts import fp4_one_row_experts
from tandem_kernels.experts.fp4.one_row.shapes import takes_one_row
from tandem_kernels.experts.fp4.pair_shapes import format_of, fp4_pair_tunings
from tandem_kernels.experts.fp4.pairs import TokenChoice, fp4_pair_gemm


def fp4_routed_experts(
    x: Tensor,
    logits: Tensor,
    slot_mapping: Tensor,
    residual: Tensor,
    w13: Tensor,
    w2: Tensor,
    width: int,
    top_k: int,
    *,
    renormalise: bool = True,
    scaling: float = 1.0,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate: GateForm | None = None,
    f13: Tensor | None = None,
    f2: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.quantised_experts.fp4_routed_experts`; only for what `fp4_pair_tunings`
    has tunings for."""
    if takes_one_row(x, w13, width, top_k, gate):
        return fp4_one_row_experts(
            x,
            logits,
            slot_mapping,
            residual,
            w13,
            w2,
            width,
            top_k,
            renormalise=renormalise,
            scaling=scaling,
            b13=b13,
            b2=b2,
            gate=gate,
        )
    num_tokens, hidden_size = x.shape
    num_pairs = num_tokens * top_k
    shape = ExpertShape(len(w13), width, hidden_size, format_of(w13))
    tunings = fp4_pair_tunings(shape, num_pairs, gpu_name(x.device))
    assert tunings is not None, "steps of more rows are routed by themselves"
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=x.device)
    experts = torch.empty((num_tokens, top_k), dtype=torch.int32, device=x.device)
    hidden = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
    choice = TokenChoice(logits, slot_mapping, renormalise, scaling)
    fp4_pair_gemm(x, w13, weights, experts, hidden, tunings[0], b13, gate, choice, factors=f13)
    w2 = w2.unsqueeze(1)
    fp4_pair_gemm(hidden, w2, weights, experts, residual, tunings[1], b2, adds=True, factors=f2)
    return weights, experts

"""Mixtures of experts in plain torch: which experts a token goes to, and what they compute.

Source of the layer: Shazeer et al., Outrageously Large Neural Networks, 2017; of the sigmoid
scores with a bias for choosing: DeepSeek-V3, 2024.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem_kernels.elementwise.gate_form import GateForm, has_gate
from tandem_kernels.reference import steady
from tandem_kernels.reference.elementwise import fused_add_rms_norm, relu_squared, rms_norm
from tandem_kernels.reference.gemm import few_row_gemm, row_gate
from tandem_kernels.reference.layouts import kernel_takes


@kernel_takes(x="T H", norm_weight="H", weight="E H", bias="E")
def normed_router(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Normalises few rows, and computes the logits of their router.

    Args:
        x: [T, H], contiguous.
        norm_weight, eps: [H] of any precision, and what is added to the mean square; see
            `rms_norm`.
        weight: [E, H].
        bias: [E] float32 or None, added to the logits.

    Returns:
        (logits [T, E] float32, normed [T, H]). Logits may be of rows that are not rounded between.
    """
    normed = rms_norm(x, norm_weight, eps)
    logits = few_row_gemm(normed, weight, out_dtype=torch.float32)
    return logits if bias is None else logits + bias, normed


@kernel_takes(
    logits="T | E",
    slot_mapping="T: int",
    bias="E",
    logit_bias="E",
    expert_scales="E",
    own_numbers="_ E: int32",
    loads="_: int",
    table="_ _",
)
def route_tokens(
    logits: Tensor,
    slot_mapping: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    sigmoid: bool = False,
    renormalise: bool = True,
    scaling: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    logit_bias: Tensor | None = None,
    expert_scales: Tensor | None = None,
    own_numbers: Tensor | None = None,
    loads: Tensor | None = None,
    root_softplus: bool = False,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token, and how much each counts.

    Args:
        logits: [T, E] float32.
        slot_mapping: [T] int64; a token at -1 is padding and goes to no expert. With a `table`, all
            others are ids of tokens.
        bias: [E] float32 or None, added to the scores for choosing alone.
        top_k: Experts a token goes to; of equals those with the lowest numbers.
        sigmoid: Scores are sigmoids of the logits, not their softmax.
        renormalise: Weights are divided by their sum.
        scaling: Multiplies the weights in the end.
        num_groups, top_groups: Only experts of the best `top_groups` of `num_groups` groups may be
            chosen. A group counts as much as its best expert, or with a bias as its best two.
        logit_bias: [E] float32 or None, added to the logits.
        expert_scales: [E] float32 or None, by which weights are multiplied in the end.
        own_numbers: [C, E] int32 or None: what an expert is numbered here, -1 if it is elsewhere.
            Token t looks in row t % C, so that copies of an expert share its tokens.
        loads: [experts that are here] int64 or None: each gets the number of its tokens added.
        root_softplus: Scores are roots of the softplus of the logits, not their softmax.
        table: [V, k] int32 or None: the experts of each token id. Nothing is chosen then.

    Returns:
        (weights [T, k] float32, experts [T, k] int32); -1 and 0.0 for padding, and -1 for experts
        that are elsewhere.
    """
    if logit_bias is not None:
        logits = logits + logit_bias
    if root_softplus:
        scores = steady.softplus(logits).sqrt()
    else:
        scores = steady.sigmoid(logits) if sigmoid else logits.softmax(-1)
    chosen_by = scores if bias is None else scores + bias
    if num_groups > 1:
        grouped = chosen_by.view(len(logits), num_groups, -1)
        best = grouped.topk(1 if bias is None else 2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, best.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups], 1)
        left_out = 0.0 if bias is None else float("-inf")
        chosen_by = grouped.masked_fill(~kept[..., None], left_out).flatten(1)
    experts = chosen_by.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    if table is not None:
        experts = table[slot_mapping.clamp(min=0)].long()
    weights = scores.gather(1, experts)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if expert_scales is not None:
        weights = weights * expert_scales[experts]
    if own_numbers is not None:
        row = torch.arange(len(logits), device=logits.device) % len(own_numbers)
        experts = own_numbers[row[:, None], experts]
    experts, weights = experts.int(), weights * scaling if scaling != 1.0 else weights
    if slot_mapping.is_meta or min(slot_mapping.tolist(), default=0) < 0:
        padding = (slot_mapping < 0)[:, None]
        experts, weights = experts.masked_fill(padding, -1), weights.masked_fill(padding, 0.0)
    if loads is not None:
        loads += torch.bincount(experts[experts >= 0], minlength=len(loads))
    return weights, experts


@kernel_takes(
    x="T | H",
    w13="E N H",
    w2="E H _",
    weights="T k: float32",
    experts="T k: int32",
    b13="E N",
    b2="E H",
)
def fused_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    experts: Tensor,
    fixed_order: bool = False,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    gate: GateForm | None = None,
    summed: bool = True,
    ranks: int = 1,
) -> Tensor:
    """Computes the weighted sum of each token's experts.

    Args:
        x: [T, H].
        w13: [E, 2 I, H], of each expert its gate, then its up projection; without a gate [E, I, H].
        w2: [E, H, I].
        weights: [T, k] float32.
        experts: [T, k] int32; -1: none.
        fixed_order: A token gets the same bits whatever the others are.
        b13, b2: [E, 2 I] and [E, H], biases of both projections, or None.
        gate: None: silu(gate) * up.
        summed: Else what `pairs_add_rms_norm` sums is returned.
        ranks: As many have experts of the layer as a whole, and pairs of others are none here.
            Kernels choose tiles by it.

    Returns:
        [T, H] in the dtype of `x`: the sum over k of weight * w2(silu(gate) * up). Not summed:
        [T * k, H], a token's one behind the other; those of no expert are anything.
    """
    chosen = experts.flatten()
    pairs = chosen.argsort(stable=True)
    # Numbers begin with -1, which has the first count.
    counts = torch.bincount(chosen + 1).tolist()
    numbers = [number - 1 for number, count in enumerate(counts) if count]
    rows_of_experts = x[pairs // experts.shape[1]].split_with_sizes([n for n in counts if n])
    products = [x.new_empty((0, w13.shape[1]))]
    downs: list[tuple[Tensor, Tensor | None]] = []
    for expert, rows in zip(numbers, rows_of_experts, strict=True):
        if expert < 0:
            pairs = pairs[len(rows) :]
            continue
        up_bias, down_bias = (None if bias is None else bias[expert] for bias in (b13, b2))
        up, down = w13[expert], w2[expert]
        pieces = torch.split(rows, 1) if fixed_order else (rows,)
        products += [F.linear(piece, up, up_bias) for piece in pieces]
        downs += [(down, down_bias)] * len(pieces)
    # Between the products all experts at once: no number depends on another.
    between = _between(torch.cat(products), gate)
    hidden = between.split_with_sizes([len(one) for one in products[1:]])
    parts = [F.linear(one, *down) for one, down in zip(hidden, downs, strict=True)]
    outputs = x.new_zeros((len(chosen), x.shape[1]), dtype=torch.float32)
    if parts:
        outputs[pairs] = torch.cat(parts).float() * weights.flatten()[pairs, None]
    return of_tokens(outputs.view(*experts.shape, x.shape[1]), summed).to(x.dtype)


@kernel_takes(
    x="T H",
    w13="E N H",
    w2="E H _",
    weights="T k: float32",
    experts="T k: int32",
    shared_w13="_ H",
    shared_w2="H _",
)
def experts_beside(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    experts: Tensor,
    shared_w13: Tensor,
    shared_w2: Tensor,
    gate: GateForm | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes a shared expert beside those of few tokens.

    Args:
        shared_w13: [2 S, H], its gate, then its up projection; without a gate [S, H].
        shared_w2: [H, S].

    Returns:
        (what `fused_experts` does, not summed, [T * k, H]; what the shared expert makes of each
        token, [T, H]).
    """
    parts = fused_experts(x, w13, w2, weights, experts, gate=gate, summed=False)
    beside = _one_expert(x, shared_w13, shared_w2, None, None, gate)
    return parts, beside.to(x.dtype)


def of_tokens(outputs: Tensor, summed: bool) -> Tensor:
    """Returns [T, k, H] as operations give it: [T, H] or, not summed, [T * k, H]."""
    return outputs.sum(1) if summed else outputs.flatten(0, 1)


@kernel_takes(parts="_ H", experts="T _: int32", beside="T H")
def sum_pairs(parts: Tensor, experts: Tensor | None, beside: Tensor | None = None) -> Tensor:
    """Sums the outputs of a token's experts, [T * k, H], in their order -> [T, H].

    Args:
        experts: [T, k] int32; -1: none, and its output is anything. None: `parts` are sums.
        beside: [T, H], added to the sums.
    """
    sums = parts
    if experts is not None:
        outputs = parts.view(*experts.shape, -1).float()
        sums = outputs.masked_fill((experts < 0)[..., None], 0.0).sum(1).to(parts.dtype)
    return sums if beside is None else sums + beside


@kernel_takes(
    residual="T | H", parts="_ H", experts="T _: int32", weight="H", beside="T H", gate="_ H"
)
def pairs_add_rms_norm(
    parts: Tensor,
    experts: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    beside: Tensor | None = None,
    gate: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Adds what experts give to the residual stream, and normalises it.

    Args:
        parts, experts, beside: See `sum_pairs`.
        residual: [T, H]; becomes the sum.
        weight: [H].
        eps: Added to the mean square.
        gate: Of what is beside: rows [T, H], contiguous, and a weight [1, H]; see `row_gate`. None:
            it has none.

    Returns:
        [T, H], as `fused_add_rms_norm` of what `sum_pairs` returns.
    """
    if beside is not None and gate is not None:
        beside = row_gate(beside, *gate)
    return fused_add_rms_norm(sum_pairs(parts, experts, beside), residual, weight, eps)[0]


def _one_expert(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    gate: GateForm | None,
) -> Tensor:
    """Computes [n, H] -> [n, H] float32, as halves round it."""
    return F.linear(_between(F.linear(x, w13, b13), gate), w2, b2).float()


def _between(product: Tensor, gate: GateForm | None) -> Tensor:
    """Returns what an expert's second product takes, [n, I], from its first one."""
    if not has_gate(gate):
        return relu_squared(product)
    gates, ups = product.float().chunk(2, dim=-1)
    return activated(gates, ups, gate).to(product.dtype)


def activated(gates: Tensor, ups: Tensor, gate: GateForm | None) -> Tensor:
    if gate is None:
        return steady.silu(gates) * ups
    if gate.kind == "gelu_tanh":
        return steady.gelu_tanh(gates) * ups
    if gate.kind == "situ":
        return steady.situ(gates, ups, gate)
    if gate.kind == "limited":
        return steady.silu(gates).clamp(max=gate.limit) * ups.clamp(-gate.limit, gate.limit)
    gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
    if gate.kind == "capped":
        return steady.silu(gates) * ups
    return (ups + 1) * gates * steady.sigmoid(gate.alpha * gates)

"""Checks of the launches from a router to the residual stream, for any column and any device."""

from __future__ import annotations

from typing import Any

import kernel_oracle as oracle
import torch
from fp4_checks import Form, fp4_weight
from quantised_expert_checks import Op, Sizes
from torch import Tensor

from tandem_kernels.elementwise.gate_form import GateForm
from tandem_kernels.experts.arrival_counts import arrival_counts

_ROUNDED = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
_LOGITS = 1e-2
"""Rows rounded to half precision in front of a router may change its logits by so much."""


def normed_router(
    op: Op,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    has_bias: bool = True,
    norm_dtype: torch.dtype | None = None,
) -> None:
    """Logits and normed rows are what the norm and the router mean. Sizes are rows, experts and
    hidden size."""
    num_rows, num_experts, hidden = sizes
    x = (torch.randn(num_rows, hidden, device=device) * 3).to(dtype)
    norm_weight = (torch.rand(hidden, device=device) + 0.5).to(norm_dtype or dtype)
    weight = (torch.randn(num_experts, hidden, device=device) * hidden**-0.5).to(dtype)
    bias = torch.randn(num_experts, device=device) if has_bias else None
    logits, normed = op(x, norm_weight, 1e-5, weight, bias)
    expected = oracle.rms_norm(x, norm_weight, 1e-5)
    assert logits.dtype == torch.float32 and normed.dtype == dtype
    assert oracle.relative_error(normed, expected) < _ROUNDED[dtype]
    exact = expected @ weight.double().t()
    if bias is not None:
        exact += bias.double()
    assert oracle.relative_error(logits, exact) < _LOGITS


def logits_with_ties(num_tokens: int, num_experts: int, device: str) -> Tensor:
    """Makes logits of which many are the same, and those of the first token all are."""
    logits = torch.randint(-2, 3, (num_tokens, num_experts), device=device).float()
    logits += torch.randn(num_tokens, 1, device=device)
    logits[0] = 0.5
    return logits


def routed_experts(
    op: Op,
    apart: tuple[Op, Op],
    sizes: Sizes,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    renormalise: bool = True,
    scaling: float = 1.0,
    form: Form = "mxfp4",
) -> None:
    """Choice and sum are those of the operations that do the same `apart`: `route_tokens`, but for
    the last bit of a weight, and experts that are given. Equal scores go to the lowest numbers, a
    token without a slot to no expert, and every counter is zero in the end."""
    num_tokens, top_k, num_experts, hidden, width = sizes
    weights13, f13 = _tiles(form, num_experts, (2, width, hidden), device)
    weights2, f2 = _tiles(form, num_experts, (hidden, width), device)
    of_gate = _gate(num_experts, hidden, width, dtype, device) | {"f13": f13, "f2": f2}
    x = (torch.randn(num_tokens, hidden, device=device) / 16).to(dtype)
    residual = (torch.randn(num_tokens, hidden, device=device) * 4).to(dtype)
    slots = torch.arange(num_tokens, device=device)
    for padding in (False, True):
        if padding:
            slots[num_tokens // 2] = -1
        for logits in (
            logits_with_ties(num_tokens, num_experts, device),
            torch.randn(num_tokens, num_experts, device=device) * 3,
        ):
            options: dict[str, Any] = {"renormalise": renormalise, "scaling": scaling}
            route, experts = apart
            weights, chosen = route(logits, slots, None, top_k, **options)
            stream = residual.clone()
            given = logits, slots, stream, weights13, weights2, width, top_k
            found = op(x, *given, **options, **of_gate)
            assert torch.equal(found[1], chosen)
            # A softmax of 60 scores is summed in another order by warps that have 64 lanes each.
            torch.testing.assert_close(found[0], weights, rtol=1e-6, atol=0.0)
            added = experts(x, weights13, weights2, width, *found, **of_gate)
            assert torch.equal(stream, (residual.float() + added.float()).to(dtype))
            assert not arrival_counts(torch.device(x.device)).any()


def _tiles(
    form: Form, num_experts: int, shape: tuple[int, ...], device: str
) -> tuple[Tensor, Tensor | None]:
    """Makes all experts' tiles and factors, one expert at a time: in float64 they would fill a
    GPU."""
    made = [fp4_weight(form, shape, device)[:2] for _ in range(num_experts)]
    factors = [factor for _, factor in made if factor is not None]
    return torch.stack([tiles for tiles, _ in made]), torch.stack(factors) if factors else None


def _gate(
    num_experts: int, hidden: int, width: int, dtype: torch.dtype, device: str
) -> dict[str, Any]:
    b13, b2 = (
        torch.randn(num_experts, size, device=device).to(dtype) for size in (2 * width, hidden)
    )
    return {"b13": b13, "b2": b2, "gate": GateForm("clamped", limit=1.25, alpha=1.702)}

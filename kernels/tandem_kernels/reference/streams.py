"""Several residual streams beside each other, in plain torch.

    streams [T, n, H] ─┬─ weights of this token: pre [n], post [n], comb [n, n]
                       ├─ sum over n of pre * stream ─ a layer ─ x [T, H]
                       └─ comb, turned ─(+)─ post * x ─▶ streams

`comb` is doubly stochastic, but for rounding: rows and columns are divided by their sums in turns.
Source: Xie et al., Manifold-Constrained Hyper-Connections (arXiv 2512.24880), as transformers 5.24
computes it (`DeepseekV4HyperConnection`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem_kernels.elementwise.norm_forms import Norm
from tandem_kernels.reference.elementwise import rms_norm
from tandem_kernels.reference.gemm import invariant_gemm
from tandem_kernels.reference.steady import sigmoid
from tandem_kernels.stream_forms import GivenToStreams, StreamForm, StreamWeights


def read_streams(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, form: StreamForm
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes what a layer reads of the streams, and how they take in what it gives.

    Args:
        streams: [T, n, H], contiguous.
        fn: [(2 + n) n, n H] float32: of `pre`, of `post` and of `comb`, row by row.
        base, scale: [(2 + n) n] and [3] float32.

    Returns:
        [T, H] in the dtype of the streams, post [T, n] and comb [T, n, n] float32.
    """
    n = streams.shape[1]
    logits = _logits(streams, fn, form)
    pre, post, comb = torch.split(logits, [n, n, n * n], dim=1)
    pre = sigmoid(pre * scale[0] + base[:n]) + form.eps
    post = 2 * sigmoid(post * scale[1] + base[n : 2 * n])
    comb = (comb * scale[2] + base[2 * n :]).view(-1, n, n)
    comb = comb.softmax(-1) + form.eps
    comb = comb / (comb.sum(-2, keepdim=True) + form.eps)
    for _ in range(form.iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + form.eps)
        comb = comb / (comb.sum(-2, keepdim=True) + form.eps)
    return _collapsed(streams, pre), post, comb


def write_streams(streams: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> None:
    """Mixes the streams [T, n, H] in place, and adds `x` [T, H] to them; `post` and `comb` are
    those of `read_streams`."""
    mixed = torch.einsum("tjk,tjh->tkh", comb, streams.float())
    streams.copy_(mixed + post[:, :, None] * x[:, None].float())


def join_streams(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, form: StreamForm
) -> Tensor:
    """Returns the sum of the streams behind all layers, [T, H], each by a weight of its own; `fn`
    [n, n H], `base` [n] and `scale` [1] are float32."""
    weights = sigmoid(_logits(streams, fn, form) * scale + base) + form.eps
    return _collapsed(streams, weights)


def enter_streams(
    streams: Tensor,
    given: GivenToStreams | None,
    weights: StreamWeights,
    form: StreamForm,
    norm: Norm,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gives the streams what the last block left, and computes the norm of what the next one reads.

    Args:
        streams: [T, n, H], contiguous. Their memory may be reused.
        given: None: nothing is left.
        weights: Of the next block, or of the head.
        norm: Of what it reads.

    Returns:
        The streams [T, n, H], the norm [T, H] in their dtype, and post and comb of `read_streams`;
        of a head both are empty.
    """
    if given is not None:
        x = given.x if given.beside is None else given.x + given.beside
        write_streams(streams, x, given.post, given.comb)
    own = weights.fn, weights.base, weights.scale
    if len(weights.fn) == streams.shape[1]:
        nothing = weights.base.new_empty(0)
        row, post, comb = join_streams(streams, *own, form), nothing, nothing
    else:
        row, post, comb = read_streams(streams, *own, form)
    return streams, rms_norm(row, norm.weight, norm.eps), post, comb


def _logits(streams: Tensor, fn: Tensor, form: StreamForm) -> Tensor:
    flat = streams.flatten(1).float()
    product = invariant_gemm(flat, fn) if form.fixed_order else F.linear(flat, fn)
    return product * torch.rsqrt(flat.square().mean(-1, keepdim=True) + form.norm_eps)


def _collapsed(streams: Tensor, weights: Tensor) -> Tensor:
    return (weights[:, :, None] * streams.float()).sum(1).to(streams.dtype)

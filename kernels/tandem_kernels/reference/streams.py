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
from tandem_kernels.reference.layouts import NORM, STREAM_WEIGHTS, kernel_takes
from tandem_kernels.reference.steady import sigmoid
from tandem_kernels.stream_forms import GivenToStreams, StreamForm, StreamWeights


@kernel_takes(streams="_ _ _", fn="O _: float32", base="O: float32", scale="_: float32")
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
    pre = sigmoid(logits[:, :n] * scale[0] + base[:n]) + form.eps
    return _collapsed(streams, pre), *_shares(logits, base, scale, form, n)


@kernel_takes(streams="T n H", x="T | H", post="T n: float32", comb="T n n: float32")
def write_streams(streams: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> None:
    """Mixes the streams [T, n, H] in place, and adds `x` [T, H] to them; `post` and `comb` are
    those of `read_streams`."""
    mixed = torch.einsum("tjk,tjh->tkh", comb, streams.float())
    streams.copy_(mixed + post[:, :, None] * x[:, None].float())


@kernel_takes(streams="_ _ _", fn="O _: float32", base="O: float32", scale="_: float32")
def join_streams(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, form: StreamForm
) -> Tensor:
    """Returns the sum of the streams behind all layers, [T, H], each by a weight of its own; `fn`
    [n, n H], `base` [n] and `scale` [1] are float32."""
    weights = sigmoid(_logits(streams, fn, form) * scale + base) + form.eps
    return _collapsed(streams, weights)


@kernel_takes(
    streams="T n H",
    given={"x": "T | H", "beside": "T | H", "post": "T n: float32", "comb": "T n n: float32"},
    weights=STREAM_WEIGHTS,
)
def mix_streams(
    streams: Tensor, given: GivenToStreams | None, weights: StreamWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """Gives the streams what the last block left, and multiplies them by the weights of the next
    one, or of the head.

    Args:
        streams: [T, n, H], contiguous. Their memory may be reused.
        given: None: nothing is left.

    Returns:
        The streams [T, n, H], and of S parts of their numbers products [S, T, outputs] and sums of
        squares [S, T], float32.
    """
    if given is not None:
        x = given.x if given.beside is None else given.x + given.beside
        write_streams(streams, x, given.post, given.comb)
    flat = streams.flatten(1).float()
    return streams, F.linear(flat, weights.fn)[None], flat.square().sum(-1)[None]


@kernel_takes(
    streams="T n H",
    logits="S T O: float32",
    squares="S T: float32",
    weights=STREAM_WEIGHTS,
    norm=NORM,
)
def norm_streams(
    streams: Tensor,
    logits: Tensor,
    squares: Tensor,
    weights: StreamWeights,
    form: StreamForm,
    norm: Norm,
) -> Tensor:
    """Computes the norm of what a block, or the head, reads, [T, H], of streams [T, n, H] and what
    `mix_streams` returned with them."""
    n = streams.shape[1]
    found = _scaled(logits, squares, form, streams[0].numel())[:, :n]
    pre = sigmoid(found * weights.scale[0] + weights.base[:n]) + form.eps
    return rms_norm(_collapsed(streams, pre), norm.weight, norm.eps)


@kernel_takes(logits="S T O: float32", squares="S T: float32", weights=STREAM_WEIGHTS)
def share_streams(
    logits: Tensor, squares: Tensor, weights: StreamWeights, form: StreamForm, width: int
) -> tuple[Tensor, Tensor]:
    """Returns post and comb of `read_streams`, of what `mix_streams` returned. `width`: H."""
    inner = weights.fn.shape[1]
    scaled = _scaled(logits, squares, form, inner)
    return _shares(scaled, weights.base, weights.scale, form, inner // width)


def _scaled(logits: Tensor, squares: Tensor, form: StreamForm, inner: int) -> Tensor:
    mean = squares.sum(0) / inner
    return logits.sum(0) * torch.rsqrt(mean + form.norm_eps)[:, None]


def _shares(
    logits: Tensor, base: Tensor, scale: Tensor, form: StreamForm, n: int
) -> tuple[Tensor, Tensor]:
    """Returns post [T, n] and comb [T, n, n] of logits [T, (2 + n) n]."""
    post = 2 * sigmoid(logits[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (logits[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n)
    comb = comb.softmax(-1) + form.eps
    comb = comb / (comb.sum(-2, keepdim=True) + form.eps)
    for _ in range(form.iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + form.eps)
        comb = comb / (comb.sum(-2, keepdim=True) + form.eps)
    return post, comb


def _logits(streams: Tensor, fn: Tensor, form: StreamForm) -> Tensor:
    flat = streams.flatten(1).float()
    product = invariant_gemm(flat, fn) if form.fixed_order else F.linear(flat, fn)
    return product * torch.rsqrt(flat.square().mean(-1, keepdim=True) + form.norm_eps)


def _collapsed(streams: Tensor, weights: Tensor) -> Tensor:
    return (weights[:, :, None] * streams.float()).sum(1).to(streams.dtype)

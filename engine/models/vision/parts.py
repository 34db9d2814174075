"""Parts of vision towers. Whole on every rank: an image is encoded alone, on each of them, so that
its embeddings depend on nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.images.vision_spec import VisionSpec
from engine.layers.norm import RMSNorm
from engine.layers.shard import CheckpointWeight, Shard

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


_LIMITS = ("input_min", "input_max", "output_min", "output_max")
_CLIPPED = ".linear"
"""Ends the name of a layer within the one that has its limits."""


class Dense(nn.Module):
    """[n, in] -> [n, out].

    Args:
        stored: Shape of an output's weights in the checkpoint; None: [in].
        clipped: How many layers of the checkpoint it is, each with limits of what it reads and
            makes; 0: these have none.
    """

    def __init__(
        self,
        size: int,
        out: int,
        shard: Shard,
        *,
        bias: bool = True,
        stored: tuple[int, ...] | None = None,
        clipped: int = 0,
    ) -> None:
        super().__init__()
        self.stored = stored or (size,)
        self.weight = shard.parameter(out, size)
        self.bias = shard.parameter(out) if bias else None
        self.limits = shard.parameter(clipped, len(_LIMITS)) if clipped else None

    def forward(self, x: Tensor) -> Tensor:
        if self.limits is None:
            return F.linear(x, self.weight, self.bias)
        parts = []
        weights = self.weight.chunk(len(self.limits))
        for weight, limits in zip(weights, self.limits, strict=True):
            least, most, least_out, most_out = limits
            made = F.linear(torch.clamp(x, least, most), weight)
            parts.append(torch.clamp(made, least_out, most_out))
        return torch.cat(parts, dim=-1)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """Yields the layer's tensors. Several prefixes, with commas between them, are of layers
        that make equal parts of the outputs."""
        names = prefix.split(",")
        if self.limits is not None:
            for part, row in zip(names, self.limits, strict=True):
                layer = part.removesuffix(_CLIPPED)
                for name, limit in zip(_LIMITS, row, strict=True):
                    yield CheckpointWeight(f"{layer}.{name}", limit, ())
        for name, parameter in self.named_parameters():
            if parameter is self.limits:
                continue
            for part, rows in zip(names, parameter.chunk(len(names)), strict=True):
                target = rows.view(-1, *self.stored) if name == "weight" else rows
                yield CheckpointWeight(f"{part}.{name}", target, tuple(target.shape))


class LayerNorm(nn.Module):
    """[n, size] -> [n, size], with mean and bias."""

    def __init__(self, size: int, eps: float, shard: Shard) -> None:
        super().__init__()
        self.eps = eps
        self.weight = shard.parameter(size)
        self.bias = shard.parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        for name, parameter in self.named_parameters():
            yield CheckpointWeight(f"{prefix}.{name}", parameter, tuple(parameter.shape))


class PositionTable(nn.Module):
    """Learned positions, [entries, H]. `stored`: its shape in the checkpoint but for H."""

    def __init__(self, stored: tuple[int, ...], count: int, size: int, shard: Shard) -> None:
        super().__init__()
        self.stored = stored
        self.weight = shard.parameter(count, size)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        shape = (*self.stored, self.weight.shape[1])
        yield CheckpointWeight(f"{prefix}.weight", self.weight.view(shape), shape)


def tower_norm(spec: VisionSpec, size: int, shard: Shard, eps: float) -> RMSNorm | LayerNorm:
    """Returns a norm of the tower's kind."""
    kind = RMSNorm if spec.block.norm == "rms" else LayerNorm
    return kind(size, eps, shard)


def unit_rows(x: Tensor, eps: float) -> Tensor:
    """Norms rows of `x` [..., size] by their root mean square, in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


class FeedForward(nn.Module):
    """[n, H] -> [n, H]: gate, up and down, or two layers with an activation between them."""

    def __init__(self, spec: VisionSpec, shard: Shard) -> None:
        super().__init__()
        size, inner, block = spec.hidden_size, spec.intermediate_size, spec.block
        dense = partial(Dense, shard=shard, bias=block.has_bias, clipped=int(block.is_clipped))
        self.activation = ACTIVATIONS[block.activation]
        self.gate = dense(size, inner) if block.is_gated else None
        self.up = dense(size, inner)
        self.down = dense(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.up(x)
        if self.gate is None:
            inner = self.activation(inner)
        else:
            inner = self.activation(self.gate(x)) * inner
        found: Tensor = self.down(inner)
        return found


class TowerAttention(nn.Module):
    """Attention of an image's patches within windows."""

    def __init__(self, spec: VisionSpec, shard: Shard) -> None:
        super().__init__()
        size, block = spec.hidden_size, spec.block
        self.num_heads = spec.num_heads
        self.turn = _TURNS.get("halves" if spec.rope is None else spec.rope.pairs, _rotated)
        has_bias = block.has_bias if block.has_qkv_bias is None else block.has_qkv_bias
        self.qkv = Dense(size, 3 * size, shard, bias=has_bias, clipped=3 * block.is_clipped)
        self.proj = Dense(size, size, shard, bias=block.has_bias, clipped=int(block.is_clipped))
        self.q_norm = self.k_norm = None
        if block.norms_heads:
            head_dim = size // spec.num_heads
            self.q_norm = RMSNorm(head_dim, block.eps, shard)
            self.k_norm = RMSNorm(head_dim, block.eps, shard)
        self.scale = 1.0 if block.norms_heads else None

    def forward(
        self, x: Tensor, rope: Tensor | None, batches: tuple[tuple[int, int], ...]
    ) -> Tensor:
        """Attends: [n, H] -> [n, H].

        Args:
            rope: [2, n, 1, head / 2] float32, cosines and sines; None: nothing turns.
            batches: (windows, patches of each) of each size, in the order of `x`.
        """
        q, k, v = self.qkv(x).view(len(x), 3, self.num_heads, -1).unbind(1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _normed(q, self.q_norm), _normed(k, self.k_norm)
            v = unit_rows(v, self.q_norm.eps)
        if rope is not None:
            q, k = self.turn(q, rope), self.turn(k, rope)
        parts: list[Tensor] = []
        start = 0
        for count, length in batches:
            stop = start + count * length
            shape = (count, length, self.num_heads, -1)
            attended = F.scaled_dot_product_attention(
                q[start:stop].reshape(shape).transpose(1, 2),
                k[start:stop].reshape(shape).transpose(1, 2),
                v[start:stop].reshape(shape).transpose(1, 2),
                scale=self.scale,
            )
            parts.append(attended.transpose(1, 2).flatten(0, 1).flatten(1))
            start = stop
        found: Tensor = self.proj(torch.cat(parts))
        return found


class TowerBlock(nn.Module):
    """[n, H] -> [n, H]: attention and feed-forward, each behind a norm and added to what it read.
    Source: Dosovitskiy et al., ViT (arXiv 2010.11929)."""

    def __init__(self, spec: VisionSpec, shard: Shard) -> None:
        super().__init__()
        self.norm1 = tower_norm(spec, spec.hidden_size, shard, spec.block.eps)
        self.attn = TowerAttention(spec, shard)
        self.norm2 = tower_norm(spec, spec.hidden_size, shard, spec.block.eps)
        self.mlp = FeedForward(spec, shard)
        self.attn_norm = self.mlp_norm = None
        if spec.block.norms_outputs:
            self.attn_norm = tower_norm(spec, spec.hidden_size, shard, spec.block.eps)
            self.mlp_norm = tower_norm(spec, spec.hidden_size, shard, spec.block.eps)

    def forward(
        self, x: Tensor, rope: Tensor | None, batches: tuple[tuple[int, int], ...]
    ) -> Tensor:
        attended = self.attn(self.norm1(x), rope, batches)
        x = x + (attended if self.attn_norm is None else self.attn_norm(attended))
        made = self.mlp(self.norm2(x))
        added: Tensor = x + (made if self.mlp_norm is None else self.mlp_norm(made))
        return added


def _normed(x: Tensor, norm: RMSNorm) -> Tensor:
    """Norms each head of `x` [n, heads, D]."""
    found: Tensor = norm(x.reshape(-1, x.shape[-1])).view(x.shape)
    return found


def _rotated(x: Tensor, rope: Tensor) -> Tensor:
    """Turns element i of each head of `x` [n, heads, D] with element i + pairs, in float32; those
    behind all pairs stay."""
    cos, sin = rope
    pairs = cos.shape[-1]
    wide = x.float()
    first, second, rest = wide[..., :pairs], wide[..., pairs : 2 * pairs], wide[..., 2 * pairs :]
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(turned, dim=-1).to(x.dtype)


def _rotated_neighbours(x: Tensor, rope: Tensor) -> Tensor:
    """Turns element 2i of each head of `x` [n, heads, D] with element 2i + 1, in float32."""
    first, second = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = rope
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)


def _rotated_apart(x: Tensor, rope: Tensor) -> Tensor:
    """Turns element i of each half of a head of `x` [n, heads, D] with element i + D / 4 of it, in
    float32."""
    first, second = x.float().view(*x.shape[:-1], 2, 2, -1).unbind(-2)
    cos, sin = rope.view(*rope.shape[:-1], 2, -1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, dim=-2).flatten(-3).to(x.dtype)


_TURNS = {"adjacent": _rotated_neighbours, "apart": _rotated_apart}

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


class Dense(nn.Module):
    """[n, in] -> [n, out].

    Args:
        stored: Shape of an output's weights in the checkpoint; None: [in].
    """

    def __init__(
        self,
        size: int,
        out: int,
        shard: Shard,
        *,
        bias: bool = True,
        stored: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.stored = stored or (size,)
        self.weight = shard.parameter(out, size)
        self.bias = shard.parameter(out) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """Yields the layer's tensors. Several prefixes, with commas between them, are of layers
        that make equal parts of the outputs."""
        names = prefix.split(",")
        for name, parameter in self.named_parameters():
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


class FeedForward(nn.Module):
    """[n, H] -> [n, H]: gate, up and down, or two layers with an activation between them."""

    def __init__(self, spec: VisionSpec, shard: Shard) -> None:
        super().__init__()
        size, inner, bias = spec.hidden_size, spec.intermediate_size, spec.block.has_bias
        self.activation = ACTIVATIONS[spec.block.activation]
        self.gate = Dense(size, inner, shard, bias=bias) if spec.block.is_gated else None
        self.up = Dense(size, inner, shard, bias=bias)
        self.down = Dense(inner, size, shard, bias=bias)

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
        self.is_adjacent = spec.rope is not None and spec.rope.pairs == "adjacent"
        has_bias = block.has_bias if block.has_qkv_bias is None else block.has_qkv_bias
        self.qkv = Dense(size, 3 * size, shard, bias=has_bias)
        self.proj = Dense(size, size, shard, bias=block.has_bias)

    def forward(
        self, x: Tensor, rope: Tensor | None, batches: tuple[tuple[int, int], ...]
    ) -> Tensor:
        """Attends: [n, H] -> [n, H].

        Args:
            rope: [2, n, 1, head / 2] float32, cosines and sines; None: nothing turns.
            batches: (windows, patches of each) of each size, in the order of `x`.
        """
        q, k, v = self.qkv(x).view(len(x), 3, self.num_heads, -1).unbind(1)
        if rope is not None:
            turn = _rotated_neighbours if self.is_adjacent else _rotated
            q, k = turn(q, rope), turn(k, rope)
        parts: list[Tensor] = []
        start = 0
        for count, length in batches:
            stop = start + count * length
            shape = (count, length, self.num_heads, -1)
            attended = F.scaled_dot_product_attention(
                q[start:stop].reshape(shape).transpose(1, 2),
                k[start:stop].reshape(shape).transpose(1, 2),
                v[start:stop].reshape(shape).transpose(1, 2),
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

    def forward(
        self, x: Tensor, rope: Tensor | None, batches: tuple[tuple[int, int], ...]
    ) -> Tensor:
        x = x + self.attn(self.norm1(x), rope, batches)
        added: Tensor = x + self.mlp(self.norm2(x))
        return added


def _rotated(x: Tensor, rope: Tensor) -> Tensor:
    """Turns element i of each head of `x` [n, heads, D] with element i + D / 2, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rope
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _rotated_neighbours(x: Tensor, rope: Tensor) -> Tensor:
    """Turns element 2i of each head of `x` [n, heads, D] with element 2i + 1, in float32."""
    first, second = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = rope
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)

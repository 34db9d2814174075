"""Parts of vision towers. Whole on every rank: an image is encoded alone, on each of them, so that
its embeddings depend on nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.images.vision_spec import VisionSpec
from engine.layers.norm import RMSNorm
from engine.layers.shard import CheckpointWeight, Shard


class Dense(nn.Module):
    """[n, in] -> [n, out], with a bias by default."""

    def __init__(self, size: int, out: int, shard: Shard, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = shard.parameter(out, size)
        self.bias = shard.parameter(out) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        for name, parameter in self.named_parameters():
            yield CheckpointWeight(f"{prefix}.{name}", parameter, tuple(parameter.shape))


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


def tower_norm(spec: VisionSpec, size: int, shard: Shard) -> RMSNorm | LayerNorm:
    """Returns the norm of the tower's family."""
    kind = RMSNorm if spec.kind == "qwen2_5" else LayerNorm
    return kind(size, spec.eps, shard)


class FeedForward(nn.Module):
    """[n, H] -> [n, H]: gate, up and down, or two layers with GELU between them."""

    def __init__(self, spec: VisionSpec, shard: Shard) -> None:
        super().__init__()
        size, inner = spec.hidden_size, spec.intermediate_size
        names = ("gate_proj", "up_proj") if spec.kind == "qwen2_5" else ("linear_fc1",)
        self.names = names
        self.inner = nn.ModuleList(Dense(size, inner, shard) for _ in names)
        self.last_name = "down_proj" if spec.kind == "qwen2_5" else "linear_fc2"
        self.last = Dense(inner, size, shard)

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.inner[0](x)
        if len(self.inner) == 2:
            inner = F.silu(first) * self.inner[1](x)
        else:
            inner = F.gelu(first, approximate="tanh")
        found: Tensor = self.last(inner)
        return found

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        for name, part in zip(self.names, self.inner, strict=True):
            assert isinstance(part, Dense)
            yield from part.checkpoint_weights(f"{prefix}.{name}")
        yield from self.last.checkpoint_weights(f"{prefix}.{self.last_name}")


class TowerAttention(nn.Module):
    """Attention of an image's patches within windows."""

    def __init__(self, spec: VisionSpec, shard: Shard) -> None:
        super().__init__()
        size = spec.hidden_size
        self.num_heads = spec.num_heads
        self.qkv = Dense(size, 3 * size, shard)
        self.proj = Dense(size, size, shard)

    def forward(self, x: Tensor, rope: Tensor, batches: tuple[tuple[int, int], ...]) -> Tensor:
        """Attends: [n, H] -> [n, H].

        Args:
            rope: [2, n, 1, head / 2] float32, cosines and sines.
            batches: (windows, patches of each) of each size, in the order of `x`.
        """
        heads: Tensor = self.qkv(x).view(len(x), 3, self.num_heads, -1)
        q, k, v = _rotated(heads[:, 0], rope), _rotated(heads[:, 1], rope), heads[:, 2]
        parts: list[Tensor] = []
        start = 0
        for count, length in batches:
            stop = start + count * length
            shape = (count, length, self.num_heads, -1)
            attended = F.scaled_dot_product_attention(
                q[start:stop].view(shape).transpose(1, 2),
                k[start:stop].view(shape).transpose(1, 2),
                v[start:stop].reshape(shape).transpose(1, 2),
            )
            parts.append(attended.transpose(1, 2).flatten(0, 1).flatten(1))
            start = stop
        found: Tensor = self.proj(torch.cat(parts))
        return found

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.qkv.checkpoint_weights(f"{prefix}.qkv")
        yield from self.proj.checkpoint_weights(f"{prefix}.proj")


class TowerBlock(nn.Module):
    """[n, H] -> [n, H]: attention and feed-forward, each behind a norm and added to what it read.
    Source: Dosovitskiy et al., ViT (arXiv 2010.11929)."""

    def __init__(self, spec: VisionSpec, shard: Shard) -> None:
        super().__init__()
        self.norm1 = tower_norm(spec, spec.hidden_size, shard)
        self.attn = TowerAttention(spec, shard)
        self.norm2 = tower_norm(spec, spec.hidden_size, shard)
        self.mlp = FeedForward(spec, shard)

    def forward(self, x: Tensor, rope: Tensor, batches: tuple[tuple[int, int], ...]) -> Tensor:
        x = x + self.attn(self.norm1(x), rope, batches)
        added: Tensor = x + self.mlp(self.norm2(x))
        return added

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.norm1.checkpoint_weights(f"{prefix}.norm1")
        yield from self.attn.checkpoint_weights(f"{prefix}.attn")
        yield from self.norm2.checkpoint_weights(f"{prefix}.norm2")
        yield from self.mlp.checkpoint_weights(f"{prefix}.mlp")


class PatchMerger(nn.Module):
    """Makes one token of the patches that lie together.

    Args:
        norms_merged: The norm is of a token's patches together, not of each.
    """

    def __init__(self, spec: VisionSpec, shard: Shard, *, norms_merged: bool = False) -> None:
        super().__init__()
        is_first_family = spec.kind == "qwen2_5"
        names = (
            ("ln_q", "mlp.0", "mlp.2") if is_first_family else ("norm", "linear_fc1", "linear_fc2")
        )
        self.names = names
        self.size = spec.hidden_size * spec.pixels.merge_size**2
        self.norms_merged = norms_merged
        self.norm = tower_norm(spec, self.size if norms_merged else spec.hidden_size, shard)
        self.first = Dense(self.size, self.size, shard)
        self.second = Dense(self.size, spec.out_hidden_size, shard)

    def forward(self, x: Tensor) -> Tensor:
        """Merges: [patches, H] -> [tokens, out]."""
        if self.norms_merged:
            merged = self.norm(x.view(-1, self.size))
        else:
            merged = self.norm(x).view(-1, self.size)
        found: Tensor = self.second(F.gelu(self.first(merged)))
        return found

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        for name, part in zip(self.names, (self.norm, self.first, self.second), strict=True):
            yield from part.checkpoint_weights(f"{prefix}.{name}")


def _rotated(x: Tensor, rope: Tensor) -> Tensor:
    """Turns element i of each head of `x` [n, heads, D] with element i + D / 2, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rope
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

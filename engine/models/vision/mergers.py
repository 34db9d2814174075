"""The ends of vision towers: patches that lie together become one token of the text part's width.

    joined     norm ─ patches side by side ─ linear ─ GELU ─ linear            Qwen-VL, Kimi
    strided    norm ─ one convolution over a token's patches ─ linear ─ GELU ─ linear     Pixtral
    gated      one convolution ─ linear ─ norm, GELU ─ gate·up ─ down                     GLM-V
    pooled     mean of a token's patches ─ norm ─ linear                                  Gemma 3
    scaled     the same, scaled, perhaps shifted, before the norm                         Gemma 4
    twice      linear ─ GELU ─ linear ─ patches side by side ─ linear ─ GELU ─ linear     MiniMax-M3
    plain      norm ─ linear                                              Gemma 4 without a tower
    folded     patches by channel ─ linear ─ GELU ─ linear ─ GELU ─ linear ─ norm    Muse Glimmer

All take [patches, H] and give [tokens, out].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from engine.images.vision_spec import Merger, VisionSpec
from engine.layers.norm import RMSNorm
from engine.layers.shard import CheckpointWeight, Shard
from engine.models.vision.parts import ACTIVATIONS, Dense, LayerNorm, tower_norm, unit_rows

_GLM_EPS = 1e-5


class JoinedMerger(nn.Module):
    """A token is its patches side by side.

    Args:
        norms_joined: The norm is of a token's patches together, not of each.
    """

    def __init__(self, spec: VisionSpec, shard: Shard, *, norms_joined: bool = False) -> None:
        super().__init__()
        self.size = spec.hidden_size * spec.pixels.merge_size**2
        self.norms_joined = norms_joined
        size = self.size if norms_joined else spec.hidden_size
        self.norm = tower_norm(spec, size, shard, spec.merger_eps)
        self.first = Dense(self.size, self.size, shard)
        self.second = Dense(self.size, spec.out_hidden_size, shard)

    def forward(self, x: Tensor) -> Tensor:
        if self.norms_joined:
            joined = self.norm(x.view(-1, self.size))
        else:
            joined = self.norm(x).view(-1, self.size)
        found: Tensor = self.second(F.gelu(self.first(joined)))
        return found


def by_channel(x: Tensor, unit: int) -> Tensor:
    """Puts the `unit` patches of a token side by side, channel by channel: [patches, H] ->
    [tokens, H * unit]."""
    return x.view(-1, unit, x.shape[1]).transpose(1, 2).flatten(1)


class Strided(Dense):
    """A convolution whose stride is its size: [patches, H] -> [tokens, out]."""

    def __init__(
        self, spec: VisionSpec, out: int, shard: Shard, *, bias: bool, stored: tuple[int, ...]
    ) -> None:
        self.unit = spec.pixels.merge_size**2
        super().__init__(spec.hidden_size * self.unit, out, shard, bias=bias, stored=stored)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(by_channel(x, self.unit))


class StridedMerger(nn.Module):
    """Pixtral's: [patches, H] -> [tokens, H] -> [tokens, out]."""

    def __init__(self, spec: VisionSpec, shard: Shard) -> None:
        super().__init__()
        size, out, bias = spec.hidden_size, spec.out_hidden_size, spec.has_merger_bias
        self.norm = tower_norm(spec, size, shard, spec.merger_eps)
        inner = (size * spec.pixels.merge_size**2,)
        self.strided = Strided(spec, size, shard, bias=False, stored=inner)
        self.first = Dense(size, out, shard, bias=bias)
        self.second = Dense(out, out, shard, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(F.gelu(self.first(self.strided(self.norm(x)))))
        return found


class GatedMerger(nn.Module):
    """GLM's: a convolution to the text part's width, and a gated feed-forward there."""

    def __init__(self, spec: VisionSpec, shard: Shard) -> None:
        super().__init__()
        out, inner, merge = spec.out_hidden_size, spec.merger_size, spec.pixels.merge_size
        kernel = (spec.hidden_size, merge, merge)
        self.strided = Strided(spec, out, shard, bias=True, stored=kernel)
        self.first = Dense(out, out, shard, bias=False)
        self.norm = LayerNorm(out, _GLM_EPS, shard)
        self.gate = Dense(out, inner, shard, bias=False)
        self.up = Dense(out, inner, shard, bias=False)
        self.down = Dense(inner, out, shard, bias=False)
        self.activation = ACTIVATIONS[spec.block.activation]

    def forward(self, x: Tensor) -> Tensor:
        tokens = F.gelu(self.norm(self.first(self.strided(x))))
        found: Tensor = self.down(self.activation(self.gate(tokens)) * self.up(tokens))
        return found


class Projection(nn.Module):
    """[n, in] -> [n, out] by a matrix that the checkpoint has as [in, out]."""

    def __init__(self, size: int, out: int, shard: Shard) -> None:
        super().__init__()
        self.weight = shard.parameter(size, out)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield CheckpointWeight(f"{prefix}.weight", self.weight, tuple(self.weight.shape))


class PooledMerger(nn.Module):
    """Gemma 3's: the mean of a token's patches."""

    def __init__(self, spec: VisionSpec, shard: Shard) -> None:
        super().__init__()
        self.unit = spec.pixels.merge_size**2
        self.norm = RMSNorm(spec.hidden_size, spec.merger_eps, shard, offset=1.0)
        self.first = Projection(spec.hidden_size, spec.out_hidden_size, shard)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.first(self.norm(x.view(-1, self.unit, x.shape[1]).mean(1)))
        return found


class Standard(nn.Module):
    """[n, size] float32 -> the same, shifted and scaled."""

    def __init__(self, size: int, shard: Shard) -> None:
        super().__init__()
        self.bias = shard.parameter(size)
        self.scale = shard.parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.bias.float()) * self.scale.float()

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        for name, parameter in self.named_parameters():
            yield CheckpointWeight(f"{prefix}.{name}", parameter, tuple(parameter.shape))


class ScaledMerger(nn.Module):
    """Gemma 4's: the mean of a token's patches times sqrt(H), in float32, which half precision has
    no room for before it is shifted."""

    def __init__(self, spec: VisionSpec, shard: Shard) -> None:
        super().__init__()
        self.unit, self.root = spec.pixels.merge_size**2, spec.hidden_size**0.5
        self.standard = Standard(spec.hidden_size, shard) if spec.standardizes else None
        self.eps = spec.merger_eps
        self.first = Dense(spec.hidden_size, spec.out_hidden_size, shard, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, self.unit, x.shape[1]).float().mean(1).to(x.dtype).float() * self.root
        if self.standard is not None:
            tokens = self.standard(tokens)
        found: Tensor = self.first(unit_rows(tokens.to(x.dtype), self.eps))
        return found


class TwiceMerger(nn.Module):
    """MiniMax-M3's: each patch gets the text part's width, then a token's together."""

    def __init__(self, spec: VisionSpec, shard: Shard) -> None:
        super().__init__()
        self.unit, out, inner = spec.pixels.merge_size**2, spec.out_hidden_size, spec.merger_size
        self.first = Dense(spec.hidden_size, inner, shard)
        self.second = Dense(inner, out, shard)
        self.third = Dense(out * self.unit, inner, shard)
        self.fourth = Dense(inner, out, shard)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.second(F.gelu(self.first(x)))
        tokens = patches.view(-1, self.unit * patches.shape[1])
        found: Tensor = self.fourth(F.gelu(self.third(tokens)))
        return found


class PlainMerger(nn.Module):
    """Gemma 4's without a tower: each patch is a token."""

    def __init__(self, spec: VisionSpec, shard: Shard) -> None:
        super().__init__()
        self.eps = spec.merger_eps
        self.first = Dense(spec.hidden_size, spec.out_hidden_size, shard, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.first(unit_rows(x, self.eps))
        return found


class FoldedMerger(nn.Module):
    """Muse Glimmer's: tokens are normed as its embeddings of text are."""

    def __init__(self, spec: VisionSpec, shard: Shard) -> None:
        super().__init__()
        self.unit, inner = spec.pixels.merge_size**2, spec.merger_size
        self.eps = spec.merger_eps
        self.first = Dense(spec.hidden_size * self.unit, inner, shard, bias=False)
        self.second = Dense(inner, inner, shard, bias=False)
        self.third = Dense(inner, spec.out_hidden_size, shard, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.second(F.gelu(self.first(by_channel(x, self.unit)))))
        return unit_rows(self.third(inner), self.eps)


MERGERS: dict[Merger, Callable[[VisionSpec, Shard], nn.Module]] = {
    "joined": JoinedMerger,
    "strided": StridedMerger,
    "gated": GatedMerger,
    "pooled": PooledMerger,
    "scaled": ScaledMerger,
    "twice": TwiceMerger,
    "plain": PlainMerger,
    "folded": FoldedMerger,
}

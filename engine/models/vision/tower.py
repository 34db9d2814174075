"""The vision tower: an image's patches become embeddings of its tokens.

pixels ─ normalise ─ patch embedding (+ positions) ─ blocks ─ merger ─▶ [tokens, H]
                                                       └ tapped ─ mergers ─▶ further [tokens, H]

What differs between families is in `VisionSpec`. Sources: Bai et al., Qwen2.5-VL (arXiv 2502.13923)
for windows; Meng et al., DeepStack (arXiv 2406.04334) for taps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from engine.images.image_input import ImagePixels
from engine.images.vision_spec import PixelSpec, VisionSpec
from engine.layers.shard import CheckpointWeight, Shard
from engine.models.vision.mergers import MERGERS, JoinedMerger
from engine.models.vision.parts import Dense, PositionTable, TowerBlock, tower_norm
from engine.models.vision.patches import stretched, turning
from engine.models.vision.windows import patch_places, window_order

_INDEX = re.compile(r"\.(\d+)(?=\.|$)")
_ORDERS = {"channels": (1, 2, 3, 4), "frames": (2, 1, 3, 4), "pixels": (2, 3, 4, 1)}
"""Channels, frames, rows and columns of a patch, as its embedding takes them."""


@runtime_checkable
class _Stored(Protocol):
    """A part that the checkpoint has tensors of."""

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]: ...


class VisionTower(nn.Module):
    """One image at a time, or pairs of frames that see each other, so that what it computes depends
    on nothing else."""

    shades: Tensor
    axes: Tensor
    frequencies: Tensor

    def __init__(self, spec: VisionSpec, shard: Shard) -> None:
        super().__init__()
        self.spec = spec
        size, stored, eps = spec.hidden_size, spec.patch_shape, spec.block.eps
        self.shade_norm = self.patch_norm = self.position_norm = None
        if spec.has_shade_norm:
            self.shade_norm = tower_norm(spec, prod(stored), shard, eps)
        self.patch = Dense(prod(stored), size, shard, bias=spec.has_patch_bias, stored=stored)
        if spec.has_patch_norm:
            self.patch_norm = tower_norm(spec, size, shard, eps)
        if spec.has_position_norm:
            self.position_norm = tower_norm(spec, size, shard, eps)
        self.positions = None
        if (learned := spec.positions) is not None:
            self.positions = PositionTable(learned.shape, prod(learned.shape), size, shard)
        self.blocks = nn.ModuleList(TowerBlock(spec, shard) for _ in range(spec.depth))
        self.norm = tower_norm(spec, size, shard, eps) if spec.has_final_norm else None
        self.merger = MERGERS[spec.merger](spec, shard)
        self.taps = nn.ModuleList(
            JoinedMerger(spec, shard, norms_joined=True) for _ in spec.tapped_layers
        )
        self._register("shades", shade_table(spec.pixels), shard)
        if spec.rope is not None:
            axes, frequencies = turning(spec.rope, size // spec.num_heads)
            self._register("axes", axes, shard)
            self._register("frequencies", frequencies, shard)

    def _register(self, name: str, values: Tensor, shard: Shard) -> None:
        self.register_buffer(name, values.to(shard.device), persistent=False)

    @property
    def patches_of_token(self) -> int:
        return self.spec.pixels.merge_size**2

    @torch.inference_mode()
    def encode(self, image: ImagePixels) -> Tensor:
        """Returns [1 + taps, tokens, H]: embeddings of the image's tokens, row by row and pair by
        pair, and what is added to them behind the first layers of the text part."""
        spec, merge = self.spec, self.spec.pixels.merge_size
        device, num_pairs = self.patch.weight.device, self.spec.num_pairs(image)
        rows = image.rows * num_pairs
        order = window_order(rows, image.columns, spec.window_size // spec.pixels.unit)
        tokens = torch.from_numpy(order.tokens).to(device, non_blocking=True)
        places = torch.from_numpy(patch_places(image.rows, image.columns, merge, num_pairs))
        places = places.to(device, non_blocking=True)
        unit = merge**2
        x = _in_order(self._embedded(image, places), tokens, unit)
        rope = None if spec.rope is None else self._rope(_in_order(places, tokens, unit))
        windows = tuple((count, length * unit) for count, length in order.batches)
        whole = ((1, len(x)),)
        taps: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            x = block(x, rope, whole if index in spec.full_layers else windows)
            if index in spec.tapped_layers:
                taps.append(self.taps[spec.tapped_layers.index(index)](x))
        if self.norm is not None:
            x = self.norm(x)
        found = torch.stack([self.merger(x), *taps])
        in_rows = torch.empty_like(found)
        in_rows[:, tokens] = found
        return in_rows

    def _embedded(self, image: ImagePixels, places: Tensor) -> Tensor:
        """Returns [patches, H]. Pixels are normalised by a table, in float32."""
        spec, weight = self.spec, self.patch.weight
        side, merge = spec.pixels.patch_size, spec.pixels.merge_size
        patches = np.frombuffer(image.patches, np.uint8).reshape(len(places), 3, -1, side, side)
        shades = torch.from_numpy(patches.copy()).to(weight.device, non_blocking=True)
        channels = torch.arange(3, device=shades.device).view(3, 1, 1, 1)
        normal = self.shades[channels, shades.int()].to(weight.dtype)
        num_frames = weight.shape[1] // (3 * side**2)  # an image counts as equal ones
        normal = normal.expand(-1, -1, num_frames, -1, -1).permute(0, *_ORDERS[spec.patch_order])
        x: Tensor = normal.flatten(1)
        if self.shade_norm is not None:
            x = self.shade_norm(x)
        x = self.patch(x)
        if self.patch_norm is not None:
            x = self.patch_norm(x)
        if self.positions is not None and spec.positions is not None:
            grid = torch.tensor([image.rows * merge, image.columns * merge], device=places.device)
            table = self.positions.weight
            x = x + stretched(table, spec.positions, places[:, :2], grid).to(x.dtype)
        return x if self.position_norm is None else self.position_norm(x)

    def _rope(self, places: Tensor) -> Tensor:
        """Returns [2, patches, 1, head / 2]: cosines and sines."""
        angles = (places.float()[:, self.axes] * self.frequencies).unsqueeze(1)
        return torch.stack((angles.cos(), angles.sin()))

    def checkpoint_weights(self) -> Iterator[CheckpointWeight]:
        """Yields every tensor that the checkpoint must have of the tower."""
        for name, module in self.named_modules():
            if isinstance(module, _Stored) and name:
                index = _INDEX.search(name)
                prefix = self.spec.names[_INDEX.sub("", name)]
                numbered = prefix.replace("{}", index[1]) if index else prefix
                yield from module.checkpoint_weights(numbered)

    @property
    def stackable_experts(self) -> None:
        return None

    @property
    def elsewhere(self) -> frozenset[str]:
        """Returns nothing: a rank with a tower has all of it."""
        return frozenset()

    @property
    def unused_weights(self) -> frozenset[str]:
        return frozenset()


def _in_order(patches: Tensor, tokens: Tensor, unit: int) -> Tensor:
    """Returns [patches, ...] with each `unit` of them, a token's, in the order `tokens`."""
    return patches.view(-1, unit, patches.shape[1])[tokens].view(patches.shape)


def shade_table(pixels: PixelSpec) -> Tensor:
    """Returns [3, 256] float32: what each shade of each channel is to the tower, in the order of
    operations, and with the roundings, of the reference processor."""
    shades = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean, std = np.array(pixels.mean, np.float32), np.array(pixels.std, np.float32)
    return torch.from_numpy((shades[None] - mean[:, None]) / std[:, None])

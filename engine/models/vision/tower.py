"""The vision tower: an image's patches become embeddings of its tokens.

pixels ─ normalise ─ patch embedding (+ positions) ─ blocks ─ merger ─▶ [tokens, H]
                                                       └ tapped ─ mergers ─▶ further [tokens, H]

Sources: Bai et al., Qwen2.5-VL (arXiv 2502.13923) for windows; Meng et al., DeepStack (arXiv
2406.04334) for taps.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.images.image_input import ImagePixels
from engine.images.vision_spec import PixelSpec, VisionSpec
from engine.layers.rotary import inverse_frequencies
from engine.layers.shard import CheckpointWeight, Shard
from engine.models.vision.parts import PatchMerger, TowerBlock
from engine.models.vision.windows import patch_places, window_order

_THETA = 10_000.0
_PREFIX = "visual"


class VisionTower(nn.Module):
    """One image at a time, so that what it computes depends on nothing else."""

    positions: nn.Parameter | None
    shades: Tensor
    frequencies: Tensor

    def __init__(self, spec: VisionSpec, shard: Shard) -> None:
        super().__init__()
        self.spec = spec
        pixels, size = spec.pixels, spec.hidden_size
        side = pixels.patch_size
        self.patch = shard.parameter(size, 3, pixels.temporal_patch_size, side, side)
        has_positions = spec.num_positions > 0
        self.patch_bias = shard.parameter(size) if has_positions else None
        self.positions = shard.parameter(spec.num_positions, size) if has_positions else None
        self.blocks = nn.ModuleList(TowerBlock(spec, shard) for _ in range(spec.depth))
        self.merger = PatchMerger(spec, shard)
        self.tapped_mergers = nn.ModuleList(
            PatchMerger(spec, shard, norms_merged=True) for _ in spec.tapped_layers
        )
        self.register_buffer("shades", shade_table(pixels).to(shard.device), persistent=False)
        frequencies = inverse_frequencies(size // spec.num_heads // 2, _THETA)
        self.register_buffer("frequencies", frequencies.to(shard.device), persistent=False)

    @property
    def patches_of_token(self) -> int:
        return self.spec.pixels.merge_size**2

    @torch.inference_mode()
    def encode(self, image: ImagePixels) -> Tensor:
        """Returns [1 + taps, tokens, H]: embeddings of the image's tokens, row by row, and what is
        added to them behind the first layers of the text part."""
        spec, merge = self.spec, self.spec.pixels.merge_size
        device = self.patch.device
        order = window_order(image.rows, image.columns, spec.window_size // spec.pixels.unit)
        tokens = torch.from_numpy(order.tokens).to(device, non_blocking=True)
        places = torch.from_numpy(patch_places(image.rows, image.columns, merge))
        places = places.to(device, non_blocking=True)
        unit = merge**2
        x = _in_order(self._embedded(image, places), tokens, unit)
        rope = self._rope(_in_order(places, tokens, unit))
        windows = tuple((count, length * unit) for count, length in order.batches)
        whole = ((1, len(x)),)
        taps: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            x = block(x, rope, whole if index in spec.full_layers else windows)
            if index in spec.tapped_layers:
                taps.append(self.tapped_mergers[spec.tapped_layers.index(index)](x))
        found = torch.stack([self.merger(x), *taps])
        in_rows = torch.empty_like(found)
        in_rows[:, tokens] = found
        return in_rows

    def _embedded(self, image: ImagePixels, places: Tensor) -> Tensor:
        """Returns [patches, H]. Pixels are normalised by a table, in float32."""
        patches = np.frombuffer(image.patches, np.uint8).reshape(-1, 3, 1, *self.patch.shape[3:])
        shades = torch.from_numpy(patches.copy()).to(self.patch.device, non_blocking=True)
        channels = torch.arange(3, device=shades.device).view(3, 1, 1, 1)
        normal = self.shades[channels, shades.int()].to(self.patch.dtype)
        frames = normal.expand(-1, -1, self.patch.shape[2], -1, -1).flatten(1)
        embedded = F.linear(frames, self.patch.flatten(1), self.patch_bias)
        if self.positions is not None:
            embedded = embedded + self._learned(self.positions, places, image).to(embedded.dtype)
        return embedded

    def _learned(self, table: Tensor, places: Tensor, image: ImagePixels) -> Tensor:
        """Returns [patches, H]: the table of positions stretched over the image, between its four
        nearest entries."""
        side = round(self.spec.num_positions**0.5)
        merge = self.spec.pixels.merge_size
        last = torch.tensor(
            [max(1, image.rows * merge - 1), max(1, image.columns * merge - 1)],
            device=places.device,
        )
        at = places.float() * (side - 1) / last
        low = at.floor()
        part = at - low
        near = low.long().clamp(max=side - 1)
        far = (near + 1).clamp(max=side - 1)
        found = table.new_zeros((len(places), table.shape[1]), dtype=torch.float32)
        for rows, of_rows in ((near[:, 0], 1 - part[:, 0]), (far[:, 0], part[:, 0])):
            for columns, of_columns in ((near[:, 1], 1 - part[:, 1]), (far[:, 1], part[:, 1])):
                weight = (of_rows * of_columns).unsqueeze(1)
                found += table[rows * side + columns].float() * weight
        return found

    def _rope(self, places: Tensor) -> Tensor:
        """Returns [2, patches, 1, head / 2]: half of the pairs turn by the row, half by the
        column."""
        angles = (places.float().unsqueeze(-1) * self.frequencies).flatten(1).unsqueeze(1)
        return torch.stack((angles.cos(), angles.sin()))

    def checkpoint_weights(self) -> Iterator[CheckpointWeight]:
        """Yields every tensor that the checkpoint must have of the tower."""
        embedding = f"{_PREFIX}.patch_embed.proj"
        yield CheckpointWeight(f"{embedding}.weight", self.patch, tuple(self.patch.shape))
        if self.patch_bias is not None:
            shape = tuple(self.patch_bias.shape)
            yield CheckpointWeight(f"{embedding}.bias", self.patch_bias, shape)
        if self.positions is not None:
            shape = tuple(self.positions.shape)
            yield CheckpointWeight(f"{_PREFIX}.pos_embed.weight", self.positions, shape)
        for index, block in enumerate(self.blocks):
            assert isinstance(block, TowerBlock)
            yield from block.checkpoint_weights(f"{_PREFIX}.blocks.{index}")
        yield from self.merger.checkpoint_weights(f"{_PREFIX}.merger")
        for index, merger in enumerate(self.tapped_mergers):
            assert isinstance(merger, PatchMerger)
            yield from merger.checkpoint_weights(f"{_PREFIX}.deepstack_merger_list.{index}")

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

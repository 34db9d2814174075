"""Describes a vision tower to the engine around the model. Torch-free;
`engine.models.specs.vision` reads it from a checkpoint."""

from __future__ import annotations

from typing import Literal

import msgspec

TowerKind = Literal["qwen2_5", "qwen3"]


class PixelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How an image becomes patches (preprocessor_config.json).

    Attributes:
        patch_size: Pixels of a patch's side.
        merge_size: A token has this many patches a side.
        temporal_patch_size: An image counts as this many equal frames.
        min_pixels, max_pixels: Images are resized to this many.
        mean, std: Of each channel, in 0..1.
    """

    patch_size: int
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def unit(self) -> int:
        """Returns the pixels of a token's side: sizes of resized images are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def max_tokens(self) -> int:
        """Returns how many tokens the largest image has."""
        return self.max_pixels // self.unit**2

    def limited(self, max_tokens: int) -> PixelSpec:
        """Returns a copy whose images have at most this many tokens; 0: as they are."""
        if not max_tokens:
            return self
        most = min(self.max_pixels, max_tokens * self.unit**2)
        least = min(self.min_pixels, most)
        return msgspec.structs.replace(self, max_pixels=most, min_pixels=least)


class VisionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A vision tower, and how its text part sees images.

    Attributes:
        kind: The family of its blocks.
        window_size: Pixels of the side of a window, within which most layers attend; 0: every
            layer sees the whole image.
        full_layers: Layers that see the whole image all the same.
        num_positions: Entries of a learned table of positions, a square; 0: there is none.
        tapped_layers: Layers whose output is merged as well, and added behind the first layers of
            the text part ("deepstack").
        image_token_id: Stands for an image in a prompt, once for each of its tokens.
        rope_axes: [head_dim / 2]: which of a token's three positions (time, row, column) a pair of
            elements turns by ("mrope").
    """

    kind: TowerKind
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    pixels: PixelSpec
    window_size: int = 0
    full_layers: tuple[int, ...] = ()
    num_positions: int = 0
    tapped_layers: tuple[int, ...] = ()
    image_token_id: int
    rope_axes: tuple[int, ...]
    eps: float = 1e-6

    @property
    def patch_bytes(self) -> int:
        """Returns the bytes of a patch: each pixel's red, green and blue."""
        return 3 * self.pixels.patch_size**2

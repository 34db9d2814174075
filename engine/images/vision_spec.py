"""Describes a vision tower to the engine around the model. Torch-free;
`engine.models.specs.towers` reads it from a checkpoint."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from engine.images.image_input import ImagePixels, ImageSpan
from engine.images.video_spec import VideoSpec

Fit = Literal["area", "longest", "square", "patches", "fill", "nearest"]
"""How an image's size becomes that of a grid of tokens; see `decode_node.images.fit`."""
Resample = Literal["bicubic", "bilinear", "lanczos"]
Merger = Literal["joined", "gated", "strided", "pooled", "scaled", "twice", "plain", "folded"]
"""How patches become tokens; see `engine.models.vision.mergers`."""


class PixelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How an image becomes patches (preprocessor_config.json).

    Attributes:
        patch_size: Pixels of a patch's side.
        merge_size: A token has this many patches a side.
        temporal_patch_size: An image counts as this many equal frames.
        min_pixels, max_pixels: "area": images are resized to this many.
        keeps_token: "area": a side shorter than a token's is made as long before all else.
        longest_edge: "longest", "square", "patches": pixels of a side at most; of a square, always.
        max_patches: "patches": images are made so small that they have at most about this many.
        most_tokens: Larger images are made so small; 0: nothing more is asked for. "fill": smaller
            ones are made as large, too.
        resample: How shades between pixels are found.
        mean, std: Of each channel, in 0..1.
    """

    patch_size: int
    merge_size: int = 2
    temporal_patch_size: int = 2
    fit: Fit = "area"
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    keeps_token: bool = False
    longest_edge: int = 0
    max_patches: int = 0
    most_tokens: int = 0
    resample: Resample = "bicubic"
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def unit(self) -> int:
        """Returns the pixels of a token's side: sizes of resized images are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def max_tokens(self) -> int:
        """Returns how many tokens the largest image has at most."""
        side = math.ceil(self.longest_edge / self.unit)
        most = side * side
        if self.fit == "area":
            most = self.max_pixels // self.unit**2
        elif self.fit in ("fill", "nearest"):
            most = self.most_tokens
        elif self.fit == "patches":
            # Sides are rounded up to whole tokens behind the count: most where one is longest.
            along = self.longest_edge // self.patch_size
            count = self.max_patches // self.merge_size**2
            most = min(most, count + along + self.max_patches // max(1, along) + 4)
        return min(most, self.most_tokens or most)

    def limited(self, max_tokens: int) -> PixelSpec:
        """Returns a copy whose images have at most this many tokens; 0: as they are. Images of a
        tower that takes one size alone stay."""
        if not max_tokens or self.fit == "square":
            return self
        if self.fit != "area":
            return msgspec.structs.replace(self, most_tokens=min(max_tokens, self.max_tokens))
        most = min(self.max_pixels, max_tokens * self.unit**2)
        least = min(self.min_pixels, most)
        return msgspec.structs.replace(self, max_pixels=most, min_pixels=least)


class BlockSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of a tower: attention and feed-forward, each behind a norm.

    Attributes:
        norm: By the root mean square alone, or by mean and variance, with a bias.
        activation: Of the feed-forward.
        is_gated: The feed-forward has a gate: three layers, not two.
        has_bias: Linear layers have biases.
        has_qkv_bias: Those of queries, keys and values have them; None: as all.
        norms_heads: Each head's queries, keys and values are normed; their products are not scaled.
        norms_outputs: What attention and feed-forward add is normed once more.
        is_clipped: What linear layers read and make is clamped to limits of the checkpoint.
    """

    norm: Literal["rms", "layer"]
    activation: Literal["silu", "gelu", "gelu_pytorch_tanh"]
    is_gated: bool = False
    has_bias: bool = True
    has_qkv_bias: bool | None = None
    norms_heads: bool = False
    norms_outputs: bool = False
    is_clipped: bool = False
    eps: float = 1e-6


class PatchPositions(msgspec.Struct, frozen=True, kw_only=True):
    """A learned table of positions, stretched over the image.

    Attributes:
        shape: Of the table without the width of an entry; its sides are equal.
        resample: Between corner and corner ("linear"), or between the middles of entries ("cubic").
            "axes": it is not stretched, and has a row for columns and one for rows; "pairs": it has
            both of each number together. "crossed": between the middles of entries, of which those
            outside count as zeros; patches take them in the order in which they would lie if rows
            were columns.
    """

    shape: tuple[int, ...]
    resample: Literal["linear", "cubic", "axes", "pairs", "crossed"]

    @property
    def side(self) -> int:
        return math.isqrt(math.prod(self.shape))


class PatchRope(msgspec.Struct, frozen=True, kw_only=True):
    """How queries and keys turn by a patch's row and column.

    Attributes:
        pairs: "halves": the first half of a head's pairs by the row, the second by the column, with
            the same frequencies. "shared": so, and rows and columns take frequencies in turn.
            "adjacent": elements 2i and 2i + 1 are a pair, and pairs turn by the column and the row
            in turn. "apart": the first half of a head turns by the column and the second by the
            row, each as a head of its own. "thirds": as "halves", and a third of the pairs before
            them turns by time, which is 0 in an image; what is left over stays. "columns": as
            "halves", by the column first.
    """

    pairs: Literal["halves", "shared", "adjacent", "apart", "thirds", "columns"] = "halves"
    theta: float = 10_000.0


class VisionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A vision tower, and how its text part sees images.

    Attributes:
        names: What the checkpoint calls each part: modules of `engine.models.vision.tower` by their
            place in it, "{}" for the index of a block. Several names with commas between them are
            parts of one. Names of parameters end with ".weight" and ".bias" behind these.
        renamed: Expressions for names that some releases have otherwise, and what they stand for.
        patch_shape: Of the patch embedding in the checkpoint, without its outputs.
        patch_order: What its weights count first: frames of each channel, channels of each frame,
            or channels of each pixel.
        has_shade_norm: There is a norm in front of it, of a patch's shades.
        has_patch_bias, has_patch_norm: Of the patch embedding, and behind it.
        has_position_norm: There is a norm behind the learned positions.
        positions, rope: None: the tower has none.
        window_size: Pixels of the side of a window, within which most layers attend; 0: every
            layer sees the whole image.
        full_layers: Layers that see the whole image all the same.
        tapped_layers: Layers whose output is merged as well, and added behind the first layers of
            the text part ("deepstack").
        has_final_norm: There is a norm behind the blocks.
        merger: Makes tokens of patches; `merger_size`: of its inner layer, `merger_eps`: of its
            norm. `standardizes`: what it makes is shifted and scaled.
        image_token_id: Stands for an image in a prompt, once for each of its tokens.
        row_end_ids: Tokens behind each row of an image, and behind the last one, two; (): none.
        sees_whole: An image's tokens see all of it, those behind them too: it is computed in one
            step. `sees_whole_in_windows`: in layers with a window alone.
        marker, framed: What a chat template writes for an image, and what is put there.
        rope_axes: [head_dim / 2]: which of a token's three positions (time, row, column) a pair of
            elements turns by ("mrope"); (): tokens of images have positions as text has.
        video: How it sees videos; None: it sees none here.
    """

    names: dict[str, str]
    renamed: tuple[tuple[str, str], ...] = ()
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    pixels: PixelSpec
    block: BlockSpec
    patch_shape: tuple[int, ...]
    patch_order: Literal["channels", "frames", "pixels"] = "channels"
    has_shade_norm: bool = False
    has_patch_bias: bool = False
    has_patch_norm: bool = False
    has_position_norm: bool = False
    positions: PatchPositions | None = None
    rope: PatchRope | None = PatchRope()
    window_size: int = 0
    full_layers: tuple[int, ...] = ()
    tapped_layers: tuple[int, ...] = ()
    has_final_norm: bool = False
    merger: Merger = "joined"
    merger_size: int = 0
    merger_eps: float = 1e-6
    has_merger_bias: bool = True
    standardizes: bool = False
    image_token_id: int
    row_end_ids: tuple[int, ...] = ()
    sees_whole: bool = False
    sees_whole_in_windows: bool = False
    marker: str = ""
    framed: str = ""
    rope_axes: tuple[int, ...] = ()
    video: VideoSpec | None = None

    @property
    def patch_bytes(self) -> int:
        """Returns the bytes of a patch of one frame: each pixel's red, green and blue."""
        return 3 * self.pixels.patch_size**2

    def blank_image(self, num_tokens: int) -> ImagePixels:
        """Returns an image of at most this many tokens, nearly as many rows as columns; of a tower
        of videos with both frames of a pair."""
        columns = max(1, math.isqrt(num_tokens))
        rows = max(1, num_tokens // columns)
        frames = 1 if self.video is None else self.pixels.temporal_patch_size
        count = rows * columns * self.pixels.merge_size**2
        return ImagePixels(b"", rows, columns, bytes(count * frames * self.patch_bytes))

    def has_patches(self, image: ImagePixels) -> bool:
        """Returns whether an image, or pairs of frames, have all of their patches and no more."""
        one = image.rows * image.columns * self.pixels.merge_size**2 * self.patch_bytes
        sizes = {one}
        if self.video is not None:
            pair = one * self.pixels.temporal_patch_size
            sizes |= {pair * (count + 1) for count in range(self.video.pairs_at_once)}
        return len(image.patches) in sizes and one > 0

    def num_pairs(self, image: ImagePixels) -> int:
        """Returns how many pairs of frames a tower is given; 1: that, or an image."""
        patches = image.rows * image.columns * self.pixels.merge_size**2
        pair = patches * self.patch_bytes * self.pixels.temporal_patch_size
        return max(1, len(image.patches) // pair)

    def is_of(self, span: ImageSpan, image: ImagePixels) -> bool:
        """Returns whether a span has the size of its image, or of a pair of its frames."""
        sizes = (span.rows, span.columns) == (image.rows, image.columns)
        return sizes and span.num_encoded == self.num_pairs(image) * span.num_embeddings

    def has_tokens(self, image: ImageSpan, tokens: list[int]) -> bool:
        """Returns whether a prompt's tokens from the image's first to its last are its own."""
        if tokens == self.tokens_of(image.rows, image.columns):
            return True
        if self.video is None or image.row_ends:
            return False
        return tokens == [self.video.frame_token_id] * image.num_tokens

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Returns how names of the tower's tensors begin."""
        return tuple({f"{name.split('.', 1)[0]}." for name in self.names.values()})

    def span(self, offset: int, image: ImagePixels) -> ImageSpan:
        """Returns where an image is in a prompt that has it from `offset` on."""
        row_ends = 1 if self.row_end_ids else 0
        return ImageSpan(offset, image.rows, image.columns, image.digest, row_ends)

    def tokens_of(self, rows: int, columns: int) -> list[int]:
        """Returns the tokens of an image in a prompt."""
        if not self.row_end_ids:
            return [self.image_token_id] * (rows * columns)
        behind, last = self.row_end_ids
        tokens = ([self.image_token_id] * columns + [behind]) * rows
        return [*tokens[:-1], last]

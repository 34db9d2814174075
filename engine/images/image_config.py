"""Settings of an engine that takes images. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """Says what an engine does with images.

    Attributes:
        max_images: Of one prompt; 0: none are taken, and no tower is loaded.
        max_videos: Of one prompt; 0: none are taken.
        max_frame_pairs: Of one video.
        has_encoder: The vision tower is here. Without, KV of prompts with images must come from a
            peer.
        max_image_tokens: Larger images are made so small; 0: as the checkpoint says.
        encoder_budget: Tokens of images that one step encodes at most, but for the largest image,
            which it always may; 0: `max_num_batched_tokens`.
        cache_tokens: Embeddings of this many tokens are kept for prompts under way and those that
            come; 0: four times the budget.
    """

    max_images: int = 0
    max_videos: int = 0
    max_frame_pairs: int = 0
    has_encoder: bool = False
    max_image_tokens: int = 0
    encoder_budget: int = 0
    cache_tokens: int = 0

    @property
    def max_spans(self) -> int:
        """Returns how many images and pairs of frames a prompt has at most."""
        return self.max_images + self.max_videos * self.max_frame_pairs

"""Settings of images of either kind of node."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings

from engine.config import EngineConfig, ModelConfig
from engine.images.image_config import ImageConfig
from engine.models.errors import CheckpointError
from kv_transfer.config import KVRole


class ImageSettings(BaseSettings):
    """See docs/images.md."""

    max_images: int = Field(
        default=16,
        ge=0,
        description="Most images of one request, where the model sees any. 0: its text part alone "
        "is served. Prefill and decode nodes must agree.",
    )
    max_image_tokens: int = Field(
        default=0,
        ge=0,
        description="Larger images are made so small that they have at most this many tokens. 0: "
        "as the checkpoint says. Prefill and decode nodes must agree.",
    )
    max_videos: int = Field(
        default=4,
        ge=0,
        description="Most videos of one request, where the model sees any. Prefill and decode "
        "nodes must agree.",
    )
    max_video_frames: int = Field(
        default=0,
        ge=0,
        description="Most frames that are taken of a video. 0: as the checkpoint says. Prefill and "
        "decode nodes must agree.",
    )
    image_encoder: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Load the model's vision encoder. auto: on prefill nodes. On a decode node, "
        "without it, prompts with images are refused where no prefill node computes them.",
    )
    encoder_budget: int = Field(
        default=0,
        ge=0,
        description="Tokens of images that one step encodes at most. 0: --max-num-batched-tokens. "
        "The largest image may always be encoded.",
    )
    image_cache_tokens: int = Field(
        default=0,
        ge=0,
        description="Tokens of images whose embeddings are kept for the next request with the "
        "same image. 0: four times --encoder-budget.",
    )

    def image_config(self, model: ModelConfig, kv_role: KVRole | None) -> ImageConfig:
        """Returns what the engine does with images. Raises `CheckpointError`."""
        if model.vision_fault and self.max_images:
            raise CheckpointError(
                model.path, model.vision_fault, "start with --max-images 0: its text part is served"
            )
        wants = self.image_encoder == "on"
        if model.vision is None or self.max_images == 0:
            if wants:
                raise CheckpointError(
                    model.path,
                    "has no vision encoder that is here, or --max-images is 0",
                    "start without --image-encoder on",
                )
            return ImageConfig()
        video, most = model.vision.video, self.max_video_frames
        pairs = 0
        if video is not None:
            frames = video.limited(max_frames=most).max_frames
            pairs = -(-frames // model.vision.pixels.temporal_patch_size)
        return ImageConfig(
            max_images=self.max_images,
            max_videos=self.max_videos if pairs else 0,
            max_frame_pairs=pairs,
            has_encoder=wants or (self.image_encoder == "auto" and kv_role != "kv_consumer"),
            max_image_tokens=self.max_image_tokens,
            encoder_budget=self.encoder_budget,
            cache_tokens=self.image_cache_tokens,
        )


def takes_images(config: EngineConfig) -> bool:
    """Returns whether requests may have images."""
    return config.model.vision is not None and config.images.max_images > 0

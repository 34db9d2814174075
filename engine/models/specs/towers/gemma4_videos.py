"""Reads how videos of Gemma 4 are prepared: 32 frames of each, every one behind its 00:03."""

from __future__ import annotations

import msgspec

from engine.images.video_spec import VideoSpec
from engine.images.vision_spec import VisionSpec
from engine.models.specs.towers.fields import TowerFile

_VIDEO = 258_884
_PAD = "<|video|>"


def with_gemma4_videos(vision: VisionSpec, file: TowerFile, patches: int = 1) -> VisionSpec:
    """Returns the tower with what it makes of videos. Raises `CheckpointError`.

    Args:
        patches: Of the processor's, each of the tower's has as many a side.
    """
    said, token = file.video_processor(), file.number("video_token_id", _VIDEO)
    is_alike = said.patch_size in (None, vision.pixels.patch_size // patches)
    if not is_alike or said.pooling_kernel_size not in (None, vision.pixels.merge_size * patches):
        return vision
    video = VideoSpec(
        token_id=token,
        frame_token_id=token,
        frame_text="{clock} <|image>" + _PAD + "<image|>",
        gap=" ",
        pad=_PAD,
        sampling="count",
        max_frames=said.num_frames or 32,
        frame_tokens=said.max_soft_tokens or 70,
        min_pixels=0,
        max_pixels=0,
    )
    return msgspec.structs.replace(vision, video=video)

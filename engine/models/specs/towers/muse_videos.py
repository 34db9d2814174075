"""Reads how videos of Muse Glimmer are prepared: pairs of frames stand behind a "Time: 0.3s"."""

from __future__ import annotations

from engine.images.video_spec import VideoSpec
from engine.images.vision_spec import VisionSpec
from engine.models.specs.towers.fields import TowerFile
from engine.models.specs.towers.videos import with_frames

_VIDEO, _PAD = 200_091, "<|video|>"
_TIME = "Time: {timestamp:.1f}s"


def with_muse_videos(vision: VisionSpec, file: TowerFile) -> VisionSpec:
    """Returns the tower with what it makes of videos; without where another text announces frames.
    Raises `CheckpointError`."""
    said, token = file.video_processor(), file.number("video_token_id", _VIDEO)
    if said.frame_timestamp_format not in (None, _TIME):
        return vision
    video = VideoSpec(
        token_id=token,
        frame_token_id=token,
        opening="<|vid_start|>",
        frame_text="Time: {time:.1f}s" + _PAD,
        gap="<|vid_frame_separator|>",
        closing="<|vid_end|>",
        pad=_PAD,
        sampling="even_pairs",
        max_frames=said.num_frames or 96,
        frame_tokens=said.max_video_frame_tokens or 144,
        min_pixels=0,
        max_pixels=0,
    )
    return with_frames(vision, said, video)

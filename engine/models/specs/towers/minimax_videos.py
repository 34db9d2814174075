"""Reads how videos of MiniMax-M3 are prepared: two frames are one place in time, behind its "0.3
seconds", and four of these see each other in the tower."""

from __future__ import annotations

from engine.images.video_spec import VideoSpec
from engine.images.vision_spec import VisionSpec
from engine.models.specs.towers.fields import TowerFile
from engine.models.specs.towers.videos import with_frames

_VIDEO, _PAD = 200_026, "]<]video[>["
_FRAME = "]<]{time:.1f} seconds[>[]<]start of image[>[" + _PAD + "]<]end of image[>["
_PAIRS = 4


def with_minimax_videos(vision: VisionSpec, file: TowerFile) -> VisionSpec:
    """Returns the tower with what it makes of videos. Raises `CheckpointError`."""
    said = file.video_processor()
    token = file.number("video_token_index", file.number("video_token_id", _VIDEO))
    video = VideoSpec(
        token_id=token,
        frame_token_id=token,
        frame_text=_FRAME,
        pad=_PAD,
        sampling="even_steps",
        fps=1.0,
        min_pixels=said.min_pixels or 4 * 28 * 28,
        max_pixels=said.max_pixels or 768 * 28 * 28,
        of_all=False,
        pairs_at_once=said.vision_segment_max_frames or _PAIRS,
    )
    return with_frames(vision, said, video)

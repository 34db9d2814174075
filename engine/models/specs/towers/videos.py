"""Reads how a checkpoint's videos are prepared.

Qwen2.5-VL                     no text between frames: positions tell the time
Qwen3-VL, Qwen3.5 and later    <0.3 seconds> before each pair of frames
GLM-4.1V, 4.5V                 whole seconds behind each pair
GLM-4.6V                       the same as "0.3 seconds"
Gemma 4                        00:03 before each frame, of which 32 are taken
Muse Glimmer                   Time: 0.3s before each pair
MiniMax-M3                     ]<]0.3 seconds[>[ before each pair; four pairs see each other
"""

from __future__ import annotations

import msgspec

from engine.images.video_spec import VideoSpec
from engine.images.vision_spec import VisionSpec
from engine.models.specs.towers.fields import RESAMPLES, TowerFile, VideoProcessor

_QWEN, _QWEN_3_5, _GLM, _GLM_MOE = 151_656, 248_057, 151_344, 151_364
_QWEN_PAD, _GLM_PAD = "<|video_pad|>", "<|image|>"
_QWEN_FRAME = "<{time:.1f} seconds><|vision_start|>" + _QWEN_PAD + "<|vision_end|>"
_GLM_FRAME = "<|begin_of_image|>" + _GLM_PAD + "<|end_of_image|>"


def with_qwen2_5_videos(vision: VisionSpec, file: TowerFile, ticks: float) -> VisionSpec:
    """Returns the tower with what it makes of videos. `ticks`: positions of a second. Raises
    `CheckpointError`."""
    said, token = file.video_processor(), file.number("video_token_id", _QWEN)
    least, most = _pixels(said, 128 * 28 * 28, 768 * 28 * 28)
    video = VideoSpec(
        token_id=token,
        frame_token_id=token,
        pad=_QWEN_PAD,
        ticks_per_second=ticks,
        sampling="even_steps",
        min_pixels=least,
        max_pixels=most,
        of_all=False,
    )
    return with_frames(vision, said, video)


def with_qwen3_videos(vision: VisionSpec, file: TowerFile, *, is_3_5: bool = False) -> VisionSpec:
    """Returns the tower with what it makes of videos. Raises `CheckpointError`."""
    said = file.video_processor()
    token = file.number("video_token_id", _QWEN_3_5 if is_3_5 else _QWEN)
    least, most = _pixels(said, 128 * 32 * 32, 768 * 32 * 32)
    video = VideoSpec(
        token_id=token,
        frame_token_id=token,
        frame_text=_QWEN_FRAME,
        pad=_QWEN_PAD,
        has_mean_times=True,
        sampling="even_ends",
        min_pixels=least,
        max_pixels=most,
    )
    return with_frames(vision, said, video)


def with_glm_videos(vision: VisionSpec, file: TowerFile, *, is_dense: bool) -> VisionSpec:
    """Returns the tower with what it makes of videos. Raises `CheckpointError`."""
    said = file.video_processor()
    is_4_6 = "Glm46V" in f"{said.processor_class} {said.video_processor_type} {file.architecture}"
    least, most = _pixels(said, 112 * 112, 28 * 28 * 2 * 30_000)
    video = VideoSpec(
        token_id=file.number("video_token_id", _GLM if is_dense else _GLM_MOE),
        frame_token_id=vision.image_token_id,
        frame_text=_GLM_FRAME + ("{time:.1f} seconds" if is_4_6 else "{whole}"),
        pad=_GLM_PAD,
        sampling="paced" if is_4_6 else "seconds",
        min_pixels=least,
        max_pixels=most,
    )
    return with_frames(vision, said, video)


def _pixels(said: VideoProcessor, least: int, most: int) -> tuple[int, int]:
    return (
        said.min_pixels or said.sides.shortest_edge or least,
        said.max_pixels or said.sides.longest_edge or most,
    )


def with_frames(vision: VisionSpec, said: VideoProcessor, video: VideoSpec) -> VisionSpec:
    """Returns the tower with videos; without where frames are not prepared as images are."""
    pixels = vision.pixels
    is_alike = (
        said.patch_size in (None, pixels.patch_size)
        and said.merge_size in (None, pixels.merge_size)
        and said.temporal_patch_size in (None, pixels.temporal_patch_size)
        and said.image_mean in (None, pixels.mean)
        and said.image_std in (None, pixels.std)
        and said.resample in (None, RESAMPLES[pixels.resample])
        and not said.cap_pixels_per_frame
    )
    if not is_alike:
        return vision
    own = {
        "fps": said.fps,
        "min_frames": said.min_frames,
        "max_frames": said.max_frames,
        "max_duration": said.max_duration,
    }
    video = msgspec.structs.replace(video, **{k: v for k, v in own.items() if v is not None})
    return msgspec.structs.replace(vision, video=video)

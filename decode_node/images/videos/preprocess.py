"""Makes of a video what a vision tower is given. Pure: bytes in, pairs of frames out.

    1. opened                         `decode_node.images.videos.containers`
    2. frames are picked              `decode_node.images.videos.sampling`
    3. size, for all of them          `decode_node.images.fit`
    4. each is decoded, resized, cut into patches; one at a time, so that memory is bounded

The same steps, and the same rounding, as the reference processors of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from decode_node.images.fit import fitted_frames
from decode_node.images.preprocess import ImageError, check_size, patches_of
from decode_node.images.videos.containers import opened
from decode_node.images.videos.resize import CUBIC, LANCZOS, Frame, resized
from decode_node.images.videos.sampling import sampled
from engine.images.image_input import ImagePixels, image_digest
from engine.images.video_spec import VideoSpec
from engine.images.vision_spec import PixelSpec

MAX_PATCH_BYTES = 128 << 20
"""Limit of the patches of one request: they go to a prefill node in one message."""


class VideoPixels(msgspec.Struct, frozen=True, array_like=True):
    """Holds a video after preprocessing.

    Attributes:
        pairs: What a tower is given, one after the other, all of one size: pairs of frames, or some
            of those that follow each other at once (`VideoSpec.pairs_at_once`).
        times: Seconds of each pair, from the video's beginning.
        step_s: Seconds from one pair to the next, on average.
    """

    pairs: tuple[ImagePixels, ...]
    times: tuple[float, ...]
    step_s: float


def preprocess_video(
    data: Sequence[bytes], pixels: PixelSpec, video: VideoSpec, max_pixels: int
) -> VideoPixels:
    """Returns a video's pairs of frames. `data`: one file, or pictures. `max_pixels`: of a frame as
    it is sent. Raises `ImageError`."""
    per_pair = pixels.temporal_patch_size
    with opened(data, max_pixels, video.fps) as source:
        if len(data) > 1:
            indices = list(range(source.count))
            if source.count > video.max_frames:
                raise ImageError(f"has more than {video.max_frames} pictures; send fewer")
        else:
            indices = sampled(video, source.count, source.rate, per_pair)
        count = len(indices)
        indices += indices[-1:] * (-count % per_pair)
        cut = _Cutter(pixels, video, count)
        pairs: list[ImagePixels] = []
        waiting: list[bytes] = []
        for frame in source.frames(indices):
            waiting.append(cut.patches(frame))
            if len(waiting) == per_pair * video.pairs_at_once:
                pairs.append(cut.joined(waiting))
                waiting = []
        if waiting:
            pairs.append(cut.joined(waiting))
    seconds = [index / source.rate for index in indices]
    groups = [seconds[i : i + per_pair] for i in range(0, len(seconds), per_pair)]
    times = [(s[0] + s[-1]) / 2 if video.has_mean_times else s[0] for s in groups]
    step_s = per_pair * source.count / (count * source.rate)
    return VideoPixels(tuple(pairs), tuple(times), step_s)


class _Cutter:
    """Brings frames to one size, which that of the first one decides."""

    def __init__(self, pixels: PixelSpec, video: VideoSpec, count: int) -> None:
        self._pixels, self._video, self._count = pixels, video, count
        self._height = self._width = 0

    def patches(self, frame: Frame) -> bytes:
        if not self._height:
            height, width, _ = frame.shape
            check_size(width, height, height * width)
            size = fitted_frames(height, width, self._count, self._pixels, self._video)
            self._height, self._width = size
            if self._count * 3 * self._height * self._width > MAX_PATCH_BYTES:
                raise ImageError(
                    "is too large; send a shorter or smaller one, or its operator may set a "
                    "smaller --max-video-tokens"
                )
        curve = LANCZOS if self._pixels.resample == "lanczos" else CUBIC
        return patches_of(resized(frame, self._height, self._width, curve), self._pixels)

    def joined(self, frames: Sequence[bytes]) -> ImagePixels:
        """Returns a pair of frames, of frames that are equal one; or pairs behind each other."""
        unit, per_pair = self._pixels.unit, self._pixels.temporal_patch_size
        rows, columns = self._height // unit, self._width // unit
        patches = frames[0]
        if len(frames) > per_pair or any(other != patches for other in frames):
            shape = (-1, 3, self._pixels.patch_size**2)
            parts = [np.frombuffer(frame, np.uint8).reshape(shape) for frame in frames]
            groups = [parts[i : i + per_pair] for i in range(0, len(parts), per_pair)]
            patches = b"".join(np.stack(group, axis=2).tobytes() for group in groups)
        return ImagePixels(image_digest(rows, columns, patches), rows, columns, patches)

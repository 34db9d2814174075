"""Describes how a video becomes frames and tokens. Torch-free.

A tower sees a video as pairs of frames: each pair is encoded alone, as an image is, or with a few
that follow it, and is a span of its own in the prompt.

    frames   0 1 2 3 4 5 ...            of the file
    picked   0     3     6     9        `sampling`
    pairs    (0, 3)      (6, 9)         `temporal_patch_size` of the tower
    prompt   <0.1 seconds> pair <0.4 seconds> pair       `frame_text`; "": pair pair
"""

from __future__ import annotations

from typing import Literal

import msgspec

Sampling = Literal["even_steps", "even_ends", "even_pairs", "seconds", "paced", "count"]
"""How frames are picked; see `decode_node.images.videos.sampling`."""


class VideoSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How videos are prepared (video_preprocessor_config.json), and how the text part sees them.

    Attributes:
        token_id: Stands for a video where a chat template wrote one.
        frame_token_id: Stands for each token of a pair.
        frame_text: What stands in place of `token_id` for each pair, with "{time}", "{whole}" or
            "{clock}" for its seconds and `pad` where its tokens are; "": its tokens alone.
        gap: Stands between the texts of two pairs.
        opening, closing: Stand before the first one and behind the last.
        pad: The name of `frame_token_id`.
        has_mean_times: A pair's time is the mean of its frames', not the first one's.
        ticks_per_second: Positions that a second takes, where no text tells the time; 0: text does.
        sampling: How frames are picked.
        fps: Frames of a second.
        min_frames, max_frames: Of a video.
        max_duration: "seconds": of a longer video frames are as many as of one of this length.
        min_pixels, max_pixels: Frames are resized to this many; `of_all`: those of all frames
            together.
        pairs_at_once: The tower is given this many pairs that follow each other, which see each
            other there and have times of 0, 1, ...
        frame_tokens: Each frame is made as large as this many tokens, whatever its pixels; 0: not.
        max_tokens: Frames are made so small that all have at most this many tokens; 0: any number.
    """

    token_id: int
    frame_token_id: int
    frame_text: str = ""
    gap: str = ""
    opening: str = ""
    closing: str = ""
    pad: str = ""
    has_mean_times: bool = False
    ticks_per_second: float = 0.0
    sampling: Sampling
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    max_duration: int = 300
    min_pixels: int
    max_pixels: int
    of_all: bool = True
    pairs_at_once: int = 1
    frame_tokens: int = 0
    max_tokens: int = 0

    def limited(self, *, fps: float = 0.0, max_frames: int = 0, max_tokens: int = 0) -> VideoSpec:
        """Returns a copy that takes this many frames of a second, frames and tokens of a video at
        most; 0: as it is."""
        most = min(max_frames or self.max_frames, self.max_frames)
        return msgspec.structs.replace(
            self,
            fps=fps or self.fps,
            min_frames=min(self.min_frames, most),
            max_frames=most,
            max_tokens=max_tokens or self.max_tokens,
        )

"""Reads how a request wants its images and videos prepared: `mm_processor_kwargs` and
`media_io_kwargs`, as vLLM's clients send them.

    mm_processor_kwargs   min_pixels, max_pixels, size, max_soft_tokens, fps, num_frames; for one
                          kind alone in images_kwargs, videos_kwargs
    media_io_kwargs       video: fps, num_frames

A request may have less than the operator and the checkpoint allow, never more. What a model's
family has no notion of is refused by its name, before anything is fetched or decoded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from edge.http.errors import BadRequest
from engine.images.video_spec import VideoSpec
from engine.images.vision_spec import PixelSpec

PROCESSOR, IO = "mm_processor_kwargs", "media_io_kwargs"
_IMAGES, _VIDEOS = "images_kwargs", "videos_kwargs"
_NEUTRAL = {
    "do_sample_frames": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "use_audio_in_video": False,
}
"""These ask for nothing: they are done, or not done, in any case."""
_PACES = ("even_steps", "even_ends", "even_pairs", "seconds")
_COUNTS = ("even_steps", "even_ends", "even_pairs", "count")
"""Samplings that know a pace, and those that know a number of frames."""
_FRAMES = ("fps", "num_frames")
_FASTEST = 120
_SIDES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
"""Pixels of an area, by names that are no longer true: transformers goes on with them."""
Fields = Mapping[str, Any]


class Prepared(NamedTuple):
    """Says how one request's images and videos are prepared. `video` None: there are none."""

    pixels: PixelSpec
    video: VideoSpec | None


class MediaOptions(NamedTuple):
    """Holds what a request's body has of `mm_processor_kwargs` and `media_io_kwargs`."""

    processor: Mapping[str, Any] = MappingProxyType({})
    io: Mapping[str, Mapping[str, Any] | None] = MappingProxyType({})


class _Option(NamedTuple):
    """A field of a request, and what it is for: images, videos, or all that know it."""

    param: str
    name: str
    value: Any
    kinds: tuple[str, ...] = (_IMAGES, _VIDEOS)

    def whole(self, most: int, why: str = "") -> int:
        """Returns the number from 1 to `most` that it is. Raises `BadRequest`."""
        value = self.value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise BadRequest(f"{self.param} must be 1 to {most} here{why}", param=self.param)
        return value

    def pace(self) -> float:
        """Returns the frames of a second. Raises `BadRequest`."""
        value = self.value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not 0 < value <= _FASTEST:
            raise BadRequest(
                f"{self.param} must be above 0 and at most {_FASTEST}", param=self.param
            )
        return float(value)

    def refused(self, why: str) -> BadRequest:
        return BadRequest(
            f"{self.param} is not supported: {why}", param=self.param, code="unsupported_parameter"
        )


def prepared(usual: Prepared, options: MediaOptions) -> Prepared:
    """Returns how the images and videos of a request with `options` are prepared. Raises
    `BadRequest`."""
    pixels, video = usual
    asked: dict[tuple[str, tuple[str, ...]], _Option] = {}
    for option in (*_of_processor(options.processor), *_of_io(options.io)):
        if asked.setdefault((option.name, option.kinds), option).value != option.value:
            raise BadRequest(f"{option.param} is there twice, with two values", param=option.param)
    # By their names: the most before the least, which it bounds.
    for option in sorted(asked.values(), key=lambda option: option.name):
        if option.name == "max_soft_tokens":
            pixels, video = _filled(pixels, video, option)
        elif option.name in ("min_pixels", "max_pixels"):
            pixels, video = _resized(pixels, video, option)
        elif option.name not in _FRAMES:
            raise option.refused("this server prepares images and videos as the checkpoint says")
    paces = [option for option in asked.values() if option.name in _FRAMES]
    if video is not None:
        return Prepared(pixels, _sampled(video, pixels.temporal_patch_size, paces))
    if paces:
        raise paces[0].refused("this model takes no videos here")
    return Prepared(pixels, None)


def _of_processor(fields: Fields) -> Iterator[_Option]:
    both = (_IMAGES, _VIDEOS)
    yield from _flat(PROCESSOR, {k: v for k, v in fields.items() if k not in both}, both)
    for kind in both:
        inner = fields.get(kind) or {}
        if not isinstance(inner, dict):
            raise BadRequest(f"{PROCESSOR}.{kind} must be an object", param=f"{PROCESSOR}.{kind}")
        yield from _flat(f"{PROCESSOR}.{kind}", inner, (kind,))


def _flat(prefix: str, fields: Fields, kinds: tuple[str, ...]) -> Iterator[_Option]:
    for name, value in fields.items():
        param = f"{prefix}.{name}"
        if value is None or (name in _NEUTRAL and value is _NEUTRAL[name]):
            continue
        if name != "size":
            yield _Option(param, name, value, kinds)
            continue
        if not isinstance(value, dict):
            raise BadRequest(f"{param} must be an object", param=param)
        for side, found in value.items():
            # Of images, and of all frames of a video together, each for itself.
            if found is not None:
                for kind in kinds:
                    yield _Option(
                        f"{param}.{side}", _SIDES.get(str(side), str(side)), found, (kind,)
                    )


def _of_io(fields: Fields) -> Iterator[_Option]:
    for kind, inner in fields.items():
        for name, value in (inner or {}).items():
            param = f"{IO}.{kind}.{name}"
            is_known = kind == "video" and name in _FRAMES
            if value is None or (is_known and value == -1):
                continue
            if not is_known:
                raise _Option(param, name, value).refused(
                    "of videos it may have fps and num_frames"
                )
            yield _Option(param, name, value)


def _filled(
    pixels: PixelSpec, video: VideoSpec | None, option: _Option
) -> tuple[PixelSpec, VideoSpec | None]:
    if pixels.fit != "fill":
        raise option.refused("images of this model are no larger for being given tokens")
    most = None
    if _IMAGES in option.kinds:
        most = option.whole(pixels.most_tokens)
        pixels = msgspec.structs.replace(pixels, most_tokens=most)
    if video is not None and _VIDEOS in option.kinds:
        of_frames = video.frame_tokens
        most = option.whole(of_frames) if most is None else min(most, of_frames)
        video = msgspec.structs.replace(video, frame_tokens=most)
    return pixels, video


def _resized(
    pixels: PixelSpec, video: VideoSpec | None, option: _Option
) -> tuple[PixelSpec, VideoSpec | None]:
    if pixels.fit != "area":
        raise option.refused("this model's images are not sized by their pixels")
    if _IMAGES in option.kinds:
        pixels = msgspec.structs.replace(pixels, **_bounds(pixels, option))
    # Each frame is like an image, unless the bound is on the sum of all.
    if video is not None and (option.kinds == (_VIDEOS,) or not video.of_all):
        video = msgspec.structs.replace(video, **_bounds(video, option))
    return pixels, video


def _bounds(spec: PixelSpec | VideoSpec, option: _Option) -> dict[str, int]:
    value = option.whole(spec.max_pixels, ", as the checkpoint and this server's limits say")
    if option.name == "max_pixels":
        return {"max_pixels": value, "min_pixels": min(spec.min_pixels, value)}
    return {"min_pixels": value}


def _sampled(video: VideoSpec, per_pair: int, asked: list[_Option]) -> VideoSpec:
    count = pace = None
    for option in asked:
        if _VIDEOS not in option.kinds:
            raise option.refused("images have no frames")
        if option.name == "num_frames":
            if video.sampling not in _COUNTS:
                raise option.refused("this model's videos are sampled by their time; send fps")
            count = option.whole(video.max_frames, " (--max-video-frames)")
        else:
            if video.sampling not in _PACES:
                raise option.refused("this model's videos are not sampled at a pace")
            pace = option.pace()
    if count is not None and video.sampling == "even_steps":
        count = min(video.max_frames, max(per_pair, round(count / per_pair) * per_pair))
    if count is None:
        return video.limited(fps=pace or 0.0)
    if pace is not None or video.sampling == "even_pairs":
        return video.limited(fps=pace or 0.0, max_frames=count)
    return msgspec.structs.replace(video, min_frames=count, max_frames=count)

"""Opens what a client calls a video, without decoding more than is asked for.

    GIF, WebP, APNG         Pillow
    MP4, MOV, WebM, MKV     FFmpeg, by PyAV (`pip install tandem[video]`)
    pictures of their own   `data:video/jpeg;base64,...,...`, as vLLM's clients send them

A file's first bytes say its format, and the library reads it as that one: of those that it would
find, some read other files, or other hosts. Of its decoders none but those that are named here are
opened, not even to look at a stream that is not decoded.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from PIL import Image

from decode_node.images.preprocess import ImageError, check_size, decoded
from decode_node.images.videos.resize import Frame

_ANIMATED = ("GIF", "WEBP", "PNG")
_ANIMATED_HEADS = (b"GIF8", b"RIFF", b"\x89PNG")
_MATROSKA = b"\x1aE\xdf\xa3"
_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide"})
_JPEG = b"\xff\xd8\xff"
_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "libaom-av1", "mpeg4")
_OPTIONS = {"protocol_whitelist": "none", "codec_whitelist": ",".join(_CODECS)}
_DEFAULT_DELAY_MS = 100
"""Time of a picture of an animation that has none."""
_LEAST_DELAY_MS = 10


class Video(Protocol):
    """An open video."""

    @property
    def count(self) -> int:
        """Returns how many frames it has."""

    @property
    def rate(self) -> float:
        """Returns how many of them a second has."""

    def frames(self, indices: Sequence[int]) -> Iterator[Frame]:
        """Yields the frames of rising `indices`, one that comes again once more. Raises
        `ImageError`."""


@contextmanager
def opened(data: Sequence[bytes], max_pixels: int, rate: float) -> Iterator[Video]:
    """Opens a video of one file, or of pictures, of which a second has `rate`. Raises
    `ImageError`."""
    file = data[0]
    if len(data) > 1 or file.startswith(_JPEG):
        yield _Pictures(data, max_pixels, rate)
        return
    try:
        if file.startswith(_ANIMATED_HEADS):
            with Image.open(io.BytesIO(file), formats=_ANIMATED) as image:
                check_size(image.width, image.height, max_pixels)
                yield _Animation(image)
        elif file.startswith(_MATROSKA) or file[4:8] in _BOXES:
            with _ffmpeg(file) as (container, stream):
                yield _Film(container, stream, max_pixels)
        else:
            raise ImageError("is no MP4, MOV, WebM, MKV, GIF, WebP or APNG")
    except ImageError:
        raise
    except MemoryError:
        raise ImageError("takes too much memory to decode; send a smaller one") from None
    except (OSError, SyntaxError, ValueError, ArithmeticError, LookupError, TypeError) as error:
        raise ImageError(f"cannot be decoded ({type(error).__name__}); send it whole") from None


@dataclass(frozen=True, slots=True)
class _Pictures:
    data: Sequence[bytes]
    max_pixels: int
    rate: float

    @property
    def count(self) -> int:
        return len(self.data)

    def frames(self, indices: Sequence[int]) -> Iterator[Frame]:
        for index in indices:
            yield np.asarray(decoded(self.data[index], self.max_pixels))


class _Animation:
    """Its pictures may stay for different times, as where a program joined equal ones: it counts as
    a film with a frame for each of the shortest of these times."""

    def __init__(self, image: Image.Image) -> None:
        self._image = image
        delays = [self._delay_ms(index) for index in range(getattr(image, "n_frames", 1))]
        self._ends_ms = list(accumulate(delays))
        self._step_ms = max(_LEAST_DELAY_MS, min(delays))

    @property
    def count(self) -> int:
        return max(1, round(self._ends_ms[-1] / self._step_ms))

    @property
    def rate(self) -> float:
        return 1000 / self._step_ms

    def frames(self, indices: Sequence[int]) -> Iterator[Frame]:
        last = len(self._ends_ms) - 1
        for index in indices:
            middle_ms = (index + 0.5) * self._step_ms
            self._image.seek(min(last, bisect_right(self._ends_ms, middle_ms)))
            yield np.asarray(self._image.convert("RGB"))

    def _delay_ms(self, index: int) -> float:
        self._image.seek(index)
        if self._image.format == "WEBP":
            self._image.load()  # says no sooner how long it stays
        return float(self._image.info.get("duration") or _DEFAULT_DELAY_MS)


class _Film:
    """Frames are decoded one behind the other, in this thread alone, as far as the last that is
    wanted."""

    def __init__(self, container: Any, stream: Any, max_pixels: int) -> None:
        self._container, self._stream, self._max_pixels = container, stream, max_pixels
        if stream.codec_context is None or stream.codec_context.name not in _CODECS:
            raise ImageError("is in a format that is not decoded here; send H.264, VP9 or AV1")
        check_size(stream.width, stream.height, max_pixels)
        rate = stream.average_rate or stream.guessed_rate
        if not rate or rate <= 0:
            raise ImageError("does not say how many frames a second has")
        self._rate = float(rate)
        # Some formats do not say how many there are.
        self._count = sum(1 for packet in container.demux(stream) if packet.size)
        if self._count < 1:
            raise ImageError("has no frames")
        container.seek(0)
        stream.codec_context.thread_count = 1

    @property
    def count(self) -> int:
        return self._count

    @property
    def rate(self) -> float:
        return self._rate

    def frames(self, indices: Sequence[int]) -> Iterator[Frame]:
        wanted = list(indices)
        last = None
        for index, frame in enumerate(self._container.decode(self._stream)):
            if index != wanted[0]:
                continue
            check_size(frame.width, frame.height, self._max_pixels)
            last = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
            while wanted and wanted[0] == index:
                yield last
                del wanted[0]
            if not wanted:
                return
        if last is None:
            raise ImageError("has no frames")
        # A file may end before it has all the frames that it announces.
        for _ in wanted:
            yield last


@contextmanager
def _ffmpeg(file: bytes) -> Iterator[tuple[Any, Any]]:
    """Yields an open container and its stream of pictures."""
    try:
        import av
        from av.error import FFmpegError
    except ImportError:
        raise ImageError(
            "is a film, and this node decodes animations (GIF, WebP, APNG) alone; its operator "
            "may install tandem[video]"
        ) from None
    form = "matroska" if file.startswith(_MATROSKA) else "mp4"
    try:
        # Titles are in any encoding; nothing reads them.
        box = av.open(io.BytesIO(file), format=form, options=_OPTIONS, metadata_errors="replace")
        with box:
            if not box.streams.video:
                raise ImageError("has no pictures")
            yield box, box.streams.video[0]
    except FFmpegError as error:
        raise ImageError(f"cannot be decoded ({type(error).__name__}); send it whole") from None

"""Reads the images and videos of a request: from `data:` URLs, and from hosts that the operator
allows.

An error names the place in the body, and costs no other request anything.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from decode_node.images.encoded_room import EncodedRoom, Hold
from decode_node.images.image_child import ImageTask
from decode_node.images.image_parts import ImagePlace
from decode_node.images.image_pool import ImagePool
from decode_node.images.image_turns import ImageLine
from decode_node.images.media_options import IO, PROCESSOR, MediaOptions, Prepared, prepared
from decode_node.images.preprocess import ImageError
from decode_node.images.videos.preprocess import MAX_PATCH_BYTES, VideoPixels
from edge.http.errors import BadRequest
from engine.images.image_input import ImagePixels

_DATA_URL = re.compile(
    r"data:((?:image|video)/[\w.+-]{1,64})?((?:;[\w.=+-]{1,64})*?);base64,", re.I
)
_PICTURES = "video/jpeg"
"""A video as pictures with commas between them."""
_MAX_PICTURES = 4096


class Fetcher(Protocol):
    """Gets an image from a host."""

    async def fetch(self, url: str, hold: Hold) -> bytes:
        """Returns what the URL has. `hold` is called with the number of bytes that came, as they
        do. Raises `ImageError`, and what that does."""


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Limits of the images of one request, or of its videos.

    Attributes:
        max_count: 0: none are taken.
        max_bytes: Of one, encoded.
        fetcher: Gets them from hosts; None: from none.
    """

    max_count: int
    max_bytes: int
    fetcher: Fetcher | None = None


class ImageReader:
    """Reads for one model. `pool` None: the model sees no images, or they are turned off; then
    they are refused, unless it `passes_over` them."""

    def __init__(
        self,
        pool: ImagePool | None,
        images: ReadLimits,
        videos: ReadLimits | None = None,
        *,
        passes_over: bool = False,
    ) -> None:
        self._pool = pool
        self.passes_over = passes_over and pool is None
        self._limits = images, videos or ReadLimits(0, 0)
        self._room = EncodedRoom()

    async def read(
        self, places: Sequence[ImagePlace], options: MediaOptions | None = None
    ) -> list[ImagePixels | VideoPixels]:
        """Returns the images and videos at all `places`. `options`: how the request wants them
        prepared. Raises `BadRequest`, `Overloaded`, `Unavailable`."""
        how = self._prepared(options)
        if not places or self.passes_over:
            return []
        self._check_counts(places)
        assert self._pool is not None
        line = ImageLine(has_videos=any(place.is_video for place in places))
        pool = self._pool
        tasks = [asyncio.create_task(self._read(pool, place, how, line)) for place in places]
        try:
            images = list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
        parts = (image.pairs if isinstance(image, VideoPixels) else (image,) for image in images)
        if sum(len(part.patches) for group in parts for part in group) > MAX_PATCH_BYTES:
            param = places[-1].param
            raise BadRequest(
                f"{param}: the images of the request are too large together; send fewer or "
                "smaller ones",
                param=param,
            )
        return images

    def _prepared(self, options: MediaOptions | None) -> Prepared | None:
        """Returns how the request wants its images prepared; None: as all others. Raises
        `BadRequest`."""
        if options is None or not (options.processor or options.io):
            return None
        if self._pool is None:
            name = PROCESSOR if options.processor else IO
            raise BadRequest(f"{name}: this model takes no images here", param=name)
        return prepared(self._pool.prepared, options)

    def _check_counts(self, places: Sequence[ImagePlace]) -> None:
        for is_video, limits in enumerate(self._limits):
            name, some = (_kind(bool(is_video)), [p for p in places if p.is_video == is_video])
            most = limits.max_count
            if not some:
                continue
            if self._pool is None or (is_video and not self._pool.takes_videos):
                param = some[0].param
                raise BadRequest(f"{param}: this model takes no {name}s here", param=param)
            if len(some) > most:
                param = some[most].param
                raise BadRequest(f"{param}: a request may have at most {most} {name}s", param=param)

    def close(self) -> None:
        """Ends the processes that preprocess."""
        if self._pool is not None:
            self._pool.close()

    async def _read(
        self, pool: ImagePool, place: ImagePlace, how: Prepared | None, line: ImageLine
    ) -> ImagePixels | VideoPixels:
        try:
            with self._room.held() as hold:
                data = await self._encoded(place, hold)
                task = ImageTask(data, place.is_video, *(how or ()))
                return await pool.process(task, line)
        except ImageError as error:
            name = _kind(place.is_video)
            raise BadRequest(
                f"{place.param}: the {name} {error}", param=place.param, code=f"invalid_{name}"
            ) from None

    async def _encoded(self, place: ImagePlace, hold: Hold) -> list[bytes]:
        """Returns the encoded image or video, for whose bytes there is room. Raises `ImageError`,
        `Overloaded`."""
        url, limits = place.url, self._limits[place.is_video]
        if url[:5].lower() == "data:":
            data = _of_data_url(url, limits.max_bytes, place.is_video)
            hold(sum(map(len, data)))
            return data
        if url[:7].lower() != "http://" and url[:8].lower() != "https://":
            example = "video/mp4" if place.is_video else "image/png"
            raise ImageError(f"must be a data: URL, such as data:{example};base64,...")
        if limits.fetcher is None:
            raise ImageError(
                "must be a data: URL; hosts that images may come from are named by the operator "
                "(--image-url-hosts)"
            )
        return [await limits.fetcher.fetch(url, hold)]


def _kind(is_video: bool) -> str:
    return "video" if is_video else "image"


def _of_data_url(url: str, limit: int, is_video: bool) -> list[bytes]:
    head = _DATA_URL.match(url[:256])
    kind = "" if head is None else (head[1] or "").lower()
    if head is None or (kind.startswith("video/") and not is_video):
        raise ImageError("must be base64 in its data: URL, such as data:image/png;base64,...")
    if (len(url) - head.end()) * 3 // 4 > limit + 3:
        raise ImageError(f"has more than {limit} bytes")
    text = url[head.end() :]
    texts = text.split(",", _MAX_PICTURES) if kind == _PICTURES else [text]
    try:
        data = [base64.b64decode(one, validate=True) for one in texts]
    except (binascii.Error, ValueError):
        raise ImageError("is not valid base64") from None
    if sum(map(len, data)) > limit:
        raise ImageError(f"has more than {limit} bytes")
    if not all(data):
        raise ImageError("is empty")
    return data

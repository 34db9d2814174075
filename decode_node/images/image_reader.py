"""Reads the images of a request: from `data:` URLs, and from hosts that the operator allows.

An error names the image's place in the body, and costs no other request anything.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from decode_node.images.image_parts import ImagePlace
from decode_node.images.image_pool import ImagePool
from decode_node.images.image_turns import ImageLine
from decode_node.images.preprocess import ImageError
from edge.http.errors import BadRequest
from engine.images.image_input import ImagePixels

_DATA_URL = re.compile(r"data:(?:image/[\w.+-]{1,64})?((?:;[\w.=+-]{1,64})*?);base64,", re.I)
_MAX_PATCH_BYTES = 128 << 20
"""Limit of the patches of one request: they go to a prefill node in one message."""


class Fetcher(Protocol):
    """Gets an image from a host."""

    async def fetch(self, url: str) -> bytes:
        """Returns what the URL has. Raises `ImageError`."""


@dataclass(frozen=True, slots=True)
class ImageReadLimits:
    """Limits of the images of one request. `max_bytes`: of one, encoded."""

    max_images: int
    max_bytes: int


class ImageReader:
    """Reads for one model. `pool` None: the model sees no images, or they are turned off."""

    def __init__(
        self, pool: ImagePool | None, limits: ImageReadLimits, fetcher: Fetcher | None = None
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._fetcher = fetcher

    async def read(self, places: Sequence[ImagePlace]) -> list[ImagePixels]:
        """Returns the images at all `places`. Raises `BadRequest`, `Overloaded`,
        `Unavailable`."""
        if not places:
            return []
        if self._pool is None:
            raise BadRequest(
                f"{places[0].param}: this model takes no images here", param=places[0].param
            )
        most = self._limits.max_images
        if len(places) > most:
            raise BadRequest(
                f"{places[most].param}: a request may have at most {most} images",
                param=places[most].param,
            )
        line = ImageLine()
        tasks = [asyncio.create_task(self._read(self._pool, place, line)) for place in places]
        try:
            images = list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
        if sum(len(image.patches) for image in images) > _MAX_PATCH_BYTES:
            raise BadRequest(
                "the images of the request are too large together; send fewer or smaller ones",
                param=places[-1].param,
            )
        return images

    def close(self) -> None:
        """Ends the processes that preprocess."""
        if self._pool is not None:
            self._pool.close()

    async def _read(self, pool: ImagePool, place: ImagePlace, line: ImageLine) -> ImagePixels:
        try:
            return await pool.process(await self._encoded(place.url), line)
        except ImageError as error:
            raise BadRequest(
                f"{place.param}: the image {error}", param=place.param, code="invalid_image"
            ) from None

    async def _encoded(self, url: str) -> bytes:
        """Returns the encoded image. Raises `ImageError`."""
        limit = self._limits.max_bytes
        if url[:5].lower() == "data:":
            return _of_data_url(url, limit)
        if url[:7].lower() != "http://" and url[:8].lower() != "https://":
            raise ImageError("must be a data: URL, such as data:image/png;base64,...")
        if self._fetcher is None:
            raise ImageError(
                "must be a data: URL; hosts that images may come from are named by the operator "
                "(--image-url-hosts)"
            )
        return await self._fetcher.fetch(url)


def _of_data_url(url: str, limit: int) -> bytes:
    head = _DATA_URL.match(url[:256])
    if head is None:
        raise ImageError("must be base64 in its data: URL, such as data:image/png;base64,...")
    if (len(url) - head.end()) * 3 // 4 > limit + 3:
        raise ImageError(f"has more than {limit} bytes")
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise ImageError("is not valid base64") from None
    if len(data) > limit:
        raise ImageError(f"has more than {limit} bytes")
    if not data:
        raise ImageError("is empty")
    return data

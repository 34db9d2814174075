"""Reads the images of a `Prefill` call. No peer is believed: digests are computed here."""

from __future__ import annotations

from engine.contracts.errors import InvalidRequest
from engine.images.image_input import ImagePixels, image_digest
from engine.images.vision_spec import VisionSpec
from tandem_pb import prefill_pb2


def read_pixels(
    message: prefill_pb2.PrefillRequest, vision: VisionSpec | None
) -> tuple[ImagePixels, ...]:
    """Returns the images of a call. Raises `InvalidRequest`."""
    found = []
    for image in message.images:
        size = 0 if vision is None else vision.patch_bytes * vision.pixels.merge_size**2
        if not size or len(image.patches) != image.rows * image.columns * size:
            raise InvalidRequest("an image does not have the patches of its size", "images")
        digest = image_digest(image.rows, image.columns, image.patches)
        found.append(ImagePixels(digest, image.rows, image.columns, image.patches))
    return tuple(found)

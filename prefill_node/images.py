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
        digest = image_digest(image.rows, image.columns, image.patches)
        pixels = ImagePixels(digest, image.rows, image.columns, image.patches)
        if vision is None or not vision.has_patches(pixels):
            raise InvalidRequest("an image does not have the patches of its size", "images")
        found.append(pixels)
    return tuple(found)

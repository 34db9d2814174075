"""Finds the images of a chat, and puts them into its prompt.

messages ── `image_places` ──▶ (where, url) in order ── read, preprocessed ──▶ patches
prompt   ── the template writes one placeholder for each ── `expanded` ──▶ as many as it has tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode_node.protocol.chat import ChatCompletionRequest
from edge.http.errors import BadRequest
from engine.images.image_input import ImagePixels, ImageSpan
from engine.images.vision_spec import VisionSpec


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """An image as a client sent it. `param` names the part of the body that it is."""

    param: str
    url: str


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt with room for its images. `pixels`: one for each digest."""

    token_ids: list[int]
    spans: tuple[ImageSpan, ...] = ()
    pixels: tuple[ImagePixels, ...] = ()


NO_IMAGES = ImagePrompt([])


def image_places(body: ChatCompletionRequest) -> list[ImagePlace]:
    """Returns the images of all messages, in order."""
    images = [part for message in body.messages for _, part in message.images()]
    return [
        ImagePlace(param, part.url) for param, part in zip(body.image_params, images, strict=True)
    ]


def expanded(
    token_ids: list[int], images: Sequence[ImagePixels], vision: VisionSpec
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Returns a prompt with each placeholder repeated for all tokens of its image, and where the
    images are then. Raises `BadRequest` unless there is a placeholder for each image."""
    count = token_ids.count(vision.image_token_id)
    if count != len(images):
        raise BadRequest(
            f"the prompt has {count} places for its {len(images)} images: the chat template leaves "
            f"some out, or a text has the placeholder's name in it",
            param="messages",
        )
    found: list[int] = []
    spans: list[ImageSpan] = []
    start = 0
    for image in images:
        place = token_ids.index(vision.image_token_id, start)
        found += token_ids[start:place]
        spans.append(vision.span(len(found), image))
        found += vision.tokens_of(image.rows, image.columns)
        start = place + 1
    found += token_ids[start:]
    return found, tuple(spans)

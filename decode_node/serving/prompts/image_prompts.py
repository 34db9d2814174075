"""Puts the images and videos of a chat into its prompt, to be answered, or its tokens counted."""

from __future__ import annotations

from collections.abc import Sequence

from decode_node.images.image_parts import (
    Encode,
    ImagePlace,
    ImagePrompt,
    expanded,
    image_places,
)
from decode_node.images.image_reader import ImageReader
from decode_node.images.media_options import MediaOptions
from decode_node.images.videos.preprocess import VideoPixels
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.completions import CompletionRequest
from edge.http.errors import BadRequest
from engine.images.image_input import ImagePixels
from engine.images.vision_spec import VisionSpec


class ImagePrompts:
    """Serves one model. `vision` None: it sees no images, and `reader` refuses them. `encode`:
    makes tokens of the text between frames."""

    def __init__(self, reader: ImageReader, vision: VisionSpec | None, encode: Encode) -> None:
        self._reader = reader
        self._vision = vision
        self._encode = encode

    async def read(self, body: ChatCompletionRequest) -> list[ImagePixels | VideoPixels]:
        """Returns the images and videos of all messages, in order. Raises `HttpError`."""
        options = MediaOptions(body.mm_processor_kwargs or {}, body.media_io_kwargs or {})
        return await self._reader.read(image_places(body), options)

    async def read_of_text(self, body: CompletionRequest) -> list[ImagePixels | VideoPixels]:
        """Returns the images of a text with placeholders, in order. Raises `HttpError`."""
        places = [ImagePlace(param, url) for param, url in body.image_urls]
        if places and self._reader.passes_over:
            param = places[0].param
            raise BadRequest(f"{param}: this model sees no images", param=param)
        return await self._reader.read(places)

    def with_images(
        self,
        body: ChatCompletionRequest | CompletionRequest,
        token_ids: list[int],
        images: Sequence[ImagePixels | VideoPixels],
    ) -> ImagePrompt:
        """Returns the prompt with room for the tokens of its images. Raises `BadRequest`."""
        if not images:
            return ImagePrompt(token_ids)
        if body.truncate_prompt_tokens is not None:
            name = "truncate_prompt_tokens"
            raise BadRequest("a prompt with images or videos cannot be truncated", param=name)
        assert self._vision is not None
        param = "messages" if isinstance(body, ChatCompletionRequest) else _field_of(body)
        whole, spans = expanded(token_ids, images, self._vision, self._encode, param)
        pixels: dict[bytes, ImagePixels] = {}
        for image in images:
            parts = image.pairs if isinstance(image, VideoPixels) else (image,)
            pixels |= {part.digest: part for part in parts}
        return ImagePrompt(whole, spans, tuple(pixels.values()), token_ids)


def _field_of(body: CompletionRequest) -> str:
    """Returns the field that has the images of a prompt."""
    return body.image_urls[0][0].partition(".")[0]

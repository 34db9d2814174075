"""Reads the messages of a chat.

Clients send answers back as they got them, so messages may hold more fields than the API lists;
templates see all that are set (`decode_node/chat_templates/history.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from decode_node.protocol.bodies.body import Name

MAX_TOOL_CALLS = 256
"""Limit of calls in one message."""


class _OpenBody(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, use_attribute_docstrings=True)


class TextPart(BaseModel):
    """One piece of a content. Marks that clients put beside the text, as for caching, are not
    needed here."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)

    type: Literal["text", "input_text", "output_text"]
    """The API's name of text."""
    text: str
    """The text."""


class RefusalPart(BaseModel):
    """Holds what an assistant said in place of an answer. To templates it is text."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)

    type: Literal["refusal"]
    """The API's name of it."""
    refusal: str
    """The text."""

    @property
    def text(self) -> str:
        return self.refusal


class ThinkingPart(BaseModel):
    """Holds what an assistant thought, as Mistral's API has it and vLLM takes it. Templates get it
    as `reasoning_content`."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)

    type: Literal["thinking"]
    """The API's name of it."""
    thinking: str | Annotated[list[TextPart], Field(fail_fast=True)]
    """The thoughts, as one text or in pieces."""

    @property
    def thought(self) -> str:
        given = self.thinking
        return given if isinstance(given, str) else "".join(piece.text for piece in given)


class ImageUrl(BaseModel):
    """Holds an image. `detail` is not needed here: the model sees each as large as it can."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)

    url: str
    """A `data:` URL with the image in base64, or a URL of a host that the operator allows."""


class ImagePart(BaseModel):
    """An image among the pieces of a content."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)

    type: Literal["image_url", "input_image"]
    """The API's name of it."""
    image_url: ImageUrl | str
    """The image, or its URL alone."""

    @property
    def url(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


class VideoUrl(BaseModel):
    """Holds a video."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)

    url: str
    """A `data:` URL with the video in base64 (`video/jpeg`: pictures, with commas between them), or
    a URL of a host that the operator allows."""


class VideoPart(BaseModel):
    """A video among the pieces of a content."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)

    type: Literal["video_url"]
    """The API's name of it."""
    video_url: VideoUrl | str
    """The video, or its URL alone."""

    @property
    def url(self) -> str:
        return self.video_url if isinstance(self.video_url, str) else self.video_url.url


def _kind_of_part(part: Any) -> str | None:
    """Returns the tag of a part; none for audio, files and whatever else is not built."""
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", "text")
    match kind:
        case "text" | "input_text" | "output_text":
            return "part-text"
        case "image_url" | "input_image":
            return "part-image"
        case "video_url":
            return "part-video"
        case "refusal":
            return "part-refusal"
        case "thinking":
            return "part-thinking"
        case _:
            return None


ContentPart = Annotated[
    Annotated[TextPart, Tag("part-text")]
    | Annotated[RefusalPart, Tag("part-refusal")]
    | Annotated[ThinkingPart, Tag("part-thinking")]
    | Annotated[ImagePart, Tag("part-image")]
    | Annotated[VideoPart, Tag("part-video")],
    Discriminator(
        _kind_of_part,
        custom_error_type="part_type",
        custom_error_message="must have a type of text, image_url or video_url; nothing else is "
        "read",
    ),
]


ShownPart = TextPart | RefusalPart | ImagePart | VideoPart
"""Templates get these as content."""


class CalledFunction(_OpenBody):
    """Names a function and its arguments. `arguments` is JSON, as the API has it, or an object."""

    name: str
    """The function that was called."""
    arguments: str | dict[str, Any] | None = None
    """Its arguments."""


class PastToolCall(_OpenBody):
    """A call that an assistant's message made."""

    id: str | None = None
    """The name by which a tool's message answers it."""
    type: Literal["function"] | None = None
    """Only functions are called."""
    function: CalledFunction
    """The function and its arguments."""


class ChatMessage(_OpenBody):
    """One message of any role. An assistant's may hold the calls that it made and what it thought
    before; a tool's holds the result of one call."""

    role: Name
    """The speaker, in the template's words."""
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    """The text, or parts: texts, which become one text, and images and videos, where the model sees
    any."""
    tool_calls: Annotated[list[PastToolCall], Field(max_length=MAX_TOOL_CALLS)] | None = None
    """The calls that an assistant made."""
    reasoning_content: str | None = None
    """The thoughts of an assistant before its answer."""
    reasoning: str | None = None
    """Another name for `reasoning_content`."""
    prompt_token_ids: Any = None
    """The tokens of the prompt that an assistant answered, as NeMo Gym keeps them."""
    generation_token_ids: Any = None
    """The tokens of its answer: the prompt begins with these of the last answer that has them,
    where their text is what the template writes, whatever tokens that would have."""

    @property
    def thought(self) -> str:
        """Returns the reasoning, by whichever of its names it came. Blanks are none: clients send
        one where a field must not be empty, and templates would show it as a thought."""
        other = (self.model_extra or {}).get("thinking")
        given = self.reasoning_content or self.reasoning or other or self._thought_in_parts
        return given if isinstance(given, str) and given.strip() else ""

    @property
    def text(self) -> str:
        """Returns the texts of the content, a line each."""
        if not isinstance(self.content, list):
            return self.content or ""
        return "\n".join(
            part.text for part in self.content if isinstance(part, TextPart | RefusalPart)
        )

    @property
    def has_thinking_parts(self) -> bool:
        parts = self.content if isinstance(self.content, list) else []
        return any(isinstance(part, ThinkingPart) for part in parts)

    @property
    def _thought_in_parts(self) -> str:
        parts = self.content if isinstance(self.content, list) else []
        return "".join(part.thought for part in parts if isinstance(part, ThinkingPart))

    @property
    def refusal_text(self) -> str:
        """Returns what an assistant said in place of a content; "" for nothing."""
        said = (self.model_extra or {}).get("refusal")
        return said if isinstance(said, str) else ""

    def images(self) -> list[tuple[int, ImagePart | VideoPart]]:
        """Returns the images and videos among the parts, with their indices."""
        parts = self.content if isinstance(self.content, list) else []
        return [
            (j, part) for j, part in enumerate(parts) if isinstance(part, ImagePart | VideoPart)
        ]

"""Reads the messages of a chat and gives them the shape that chat templates expect.

Clients send answers back as they got them, so messages may hold more fields than the API lists;
templates see all that are set.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from decode_node.protocol.body import Name
from decode_node.protocol.valid_strings import with_valid_strings

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


def _kind_of_part(part: Any) -> str | None:
    """Returns the tag of a part; none for audio, files and whatever else is not built."""
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", "text")
    match kind:
        case "text" | "input_text" | "output_text":
            return "part-text"
        case "image_url" | "input_image":
            return "part-image"
        case "refusal":
            return "part-refusal"
        case _:
            return None


ContentPart = Annotated[
    Annotated[TextPart, Tag("part-text")]
    | Annotated[RefusalPart, Tag("part-refusal")]
    | Annotated[ImagePart, Tag("part-image")],
    Discriminator(
        _kind_of_part,
        custom_error_type="part_type",
        custom_error_message="must have a type of text or image_url; nothing else is read",
    ),
]


class CalledFunction(_OpenBody):
    """Names a function and its arguments. `arguments` is JSON, as the API has it, or an object."""

    name: str
    """The function that was called."""
    arguments: str | dict[str, Any] | None = None
    """Its arguments."""

    def for_template(self) -> dict[str, Any]:
        """Returns the function with an object as its arguments, as templates expect; text that is
        no JSON object stays as it is, because templates alone know whether they can write it.
        Clients send back what a model wrote, whose strings are valid nearly always."""
        return {**self.model_dump(exclude_none=True), "arguments": _as_object(self.arguments)}


class PastToolCall(_OpenBody):
    """A call that an assistant's message made."""

    id: str | None = None
    """The name by which a tool's message answers it."""
    type: Literal["function"] | None = None
    """Only functions are called."""
    function: CalledFunction
    """The function and its arguments."""

    def for_template(self) -> dict[str, Any]:
        call = self.model_dump(exclude_none=True)
        return {**call, "type": "function", "function": self.function.for_template()}


class ChatMessage(_OpenBody):
    """One message of any role. An assistant's may hold the calls that it made and what it thought
    before; a tool's holds the result of one call."""

    role: Name
    """The speaker, in the template's words."""
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    """The text, or parts: texts, which become one text, a line each, and images, where the model
    sees any."""
    tool_calls: Annotated[list[PastToolCall], Field(max_length=MAX_TOOL_CALLS)] | None = None
    """The calls that an assistant made."""
    reasoning_content: str | None = None
    """The thoughts of an assistant before its answer."""
    reasoning: str | None = None
    """Another name for `reasoning_content`."""

    def for_template(self) -> dict[str, Any]:
        """Returns the message as templates take it: text parts become one text, a line each; the
        content is always there, null beside calls and else empty, where a client left it out."""
        dump = self.model_dump(exclude_none=True, exclude={"content", "tool_calls"})
        message: dict[str, Any] = {"role": self.role, "content": self._content()}
        message |= {k: v for k, v in dump.items() if v != []}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if thought := self.reasoning_content or self.reasoning:
            message |= {"reasoning_content": thought, "reasoning": thought}
        return message

    def images(self) -> list[tuple[int, ImagePart]]:
        """Returns the images among the parts, with their indices."""
        parts = self.content if isinstance(self.content, list) else []
        return [(j, part) for j, part in enumerate(parts) if isinstance(part, ImagePart)]

    def _content(self) -> str | list[dict[str, str]] | None:
        """Returns text, or with images parts, which templates of models that see images take."""
        if isinstance(self.content, list):
            texts = [part.text for part in self.content if not isinstance(part, ImagePart)]
            if len(texts) == len(self.content):
                return "\n".join(texts)
            return [
                {"type": "image"}
                if isinstance(part, ImagePart)
                else {"type": "text", "text": part.text}
                for part in self.content
            ]
        if self.content is None:
            return None if self.tool_calls else ""
        return self.content


def _as_object(arguments: str | dict[str, Any] | None) -> str | dict[str, Any]:
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        found = json.loads(with_valid_strings(arguments) or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments

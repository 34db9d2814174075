"""Says requests of other APIs as chats: contents with images, and where the client wrote each.

1. `image_part(url, place)`   an image in a message that is made, with its place in the body
2. `content_of(pieces)`       texts and images of a message, as chats have them
3. `ChatOfAnother.of(fields)` the chat, which remembers the places of its images for errors
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from pydantic import PrivateAttr

from decode_node.protocol.bodies.parse_body import validate
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.chat.tools import ToolUse

Json = dict[str, Any]


class ChatOfAnother(ChatCompletionRequest):
    """A request of another API as the chat that it amounts to."""

    _image_params: tuple[str, ...] = PrivateAttr(())
    _drops_turns: bool = PrivateAttr(False)
    _hidden_tools: frozenset[str] = PrivateAttr(frozenset())
    """Functions that the turns introduce, so that the template need not show them."""
    _removed_tools: frozenset[str] = PrivateAttr(frozenset())
    """Functions that the turns have withdrawn."""

    @classmethod
    def of(cls, fields: Json) -> Self:
        """Returns the chat of `fields`, of which null ones count as left out. Raises
        `BadRequest`."""
        chat = validate({k: v for k, v in fields.items() if v is not None}, cls)
        chat._image_params = tuple(_places(fields["messages"]))
        return chat

    @property
    def drops_turns(self) -> bool:
        return self._drops_turns

    def tool_use(self) -> ToolUse:
        return super().tool_use().hiding(self._hidden_tools).without(self._removed_tools)

    @property
    def image_params(self) -> tuple[str, ...]:
        """Returns where the client's body has the images, in the order of the messages."""
        return self._image_params


def image_part(url: str, place: str) -> Json:
    """Returns an image that the client wrote at `place` of its body."""
    return {"type": "image_url", "image_url": url, "place": place}


def content_of(pieces: Sequence[str | Json]) -> str | list[Json]:
    """Returns one text as it is, and more, or images, as parts: the template says what stands
    between them."""
    if not pieces:
        return ""
    if len(pieces) == 1 and isinstance(pieces[0], str):
        return pieces[0]
    return [
        {"type": "text", "text": piece} if isinstance(piece, str) else piece for piece in pieces
    ]


def _places(messages: Sequence[Json]) -> list[str]:
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part["place"] for part in parts if "place" in part]

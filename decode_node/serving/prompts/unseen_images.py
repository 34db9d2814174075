"""Puts a text in the place of each image and video that the model does not see.

Agents read screenshots, and send all of a conversation each time: where an image is refused, none
of its turns gets through any more. The text lets the model say that it has not seen it.
"""

from __future__ import annotations

from collections.abc import Sequence

from decode_node.protocol.chat.chat_messages import ChatMessage, ContentPart, TextPart, VideoPart


def with_texts(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Returns the messages without images and videos."""
    if not any(message.images() for message in messages):
        return messages
    return [_with_texts(message) for message in messages]


def _with_texts(message: ChatMessage) -> ChatMessage:
    unseen = dict(message.images())
    if not unseen or not isinstance(message.content, list):
        return message
    parts: list[ContentPart] = [
        _text_for(unseen[i]) if i in unseen else part for i, part in enumerate(message.content)
    ]
    return message.model_copy(update={"content": parts})


def _text_for(part: ContentPart) -> TextPart:
    kind = "a video" if isinstance(part, VideoPart) else "an image"
    return TextPart(type="text", text=f"[{kind}, which this model cannot see]")

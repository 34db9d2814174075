"""Makes one message, in front, of what the system says before the first answer, without the line by
which Claude Code tells a gateway what it is.

Claude Code says its "Environment" behind the user's first words. Models are trained with one
message of the system, in front; and what stands behind the user's words shares no prefix with other
conversations. Later turns of the system stay where they are: so does the prefix before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from decode_node.protocol.chat.chat_messages import ChatMessage, ContentPart, TextPart
from decode_node.protocol.chat.joined_contents import joined_contents
from decode_node.protocol.messages.message_texts import without_billing

_SYSTEM = "system"


def system_first(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Returns the messages in that order. Those with images stay, whose places are counted."""
    opening = list(takewhile(lambda message: message.role != "assistant", messages))
    said = [one for one in opening if one.role == _SYSTEM]
    if said == opening[:1] or not said or any(one.images() for one in said):
        return list(messages)
    whole = said[0]
    if len(said) > 1:
        contents = ["" if one.content is None else one.content for one in said]
        whole = whole.model_copy(update={"content": joined_contents(contents, _text)})
    others = [one for one in opening if one.role != _SYSTEM]
    return [whole, *others, *messages[len(opening) :]]


def without_billing_line(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Returns the messages without that line, which gateways pass on as the first of the system's
    texts. Another one stands in each conversation, so that none shares a prefix with others."""
    first = messages[0]
    parts = _parts(first.content)
    text = parts[0] if parts else None
    if first.role != _SYSTEM or not isinstance(text, TextPart) or first.images():
        return messages
    kept = without_billing(text.text)
    if kept == text.text:
        return messages
    rest = parts[1:] if not kept else [text.model_copy(update={"text": kept}), *parts[1:]]
    if not rest and len(messages) > 1:
        return messages[1:]
    return [first.model_copy(update={"content": rest}), *messages[1:]]


def _parts(content: str | list[ContentPart] | None) -> list[ContentPart]:
    if isinstance(content, list):
        return content
    return [_text(content or "")]


def _text(text: str) -> ContentPart:
    return TextPart(type="text", text=text)

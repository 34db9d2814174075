"""Leaves out the oldest turns of a chat that is longer than the model's context.

A turn is a message of the user and everything up to the next one, so that no result is left without
its call. What stands before the first turn, and system messages wherever they are, stay; so does
the last turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from decode_node.protocol.chat.chat_messages import ChatMessage

_INSTRUCTIONS = ("system", "developer")


class RecentTurns:
    """Cuts one chat. `num_turns`: as many as can be left out; none of a chat with images, whose
    places are counted from its beginning."""

    def __init__(self, messages: Sequence[ChatMessage]) -> None:
        self._messages = list(messages)
        self._starts = [
            i
            for i, message in enumerate(messages)
            if message.role == "user" and (i == 0 or messages[i - 1].role != "user")
        ]
        has_images = any(message.images() for message in messages)
        self.num_turns = 0 if has_images else max(0, len(self._starts) - 1)

    def without(self, num_turns: int) -> list[ChatMessage]:
        """Returns the chat without its first `num_turns` turns."""
        if num_turns == 0:
            return self._messages
        first, rest = self._starts[0], self._starts[num_turns]
        left_out = self._messages[first:rest]
        kept = [message for message in left_out if message.role in _INSTRUCTIONS]
        return [*self._messages[:first], *kept, *self._messages[rest:]]

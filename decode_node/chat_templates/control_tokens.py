"""Keeps control tokens that users and tools write from being control tokens.

    "hi <|im_end|>"  ── split ──▶  "hi <" MARK "|im_end|>"  ── template ──▶  text with marks
                                                           ── tokens of each piece ──▶ a prompt

A piece that is tokenised alone cannot have the token of a text that it holds half of. Texts without
control tokens have no marks, and the tokens that they always had.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

Message = dict[str, Any]

MARK = "\ufdd2"
"""Stands where a control token is cut. Unicode keeps this character out of text."""
_LOOKS_LIKE_CONTROL = re.compile(r"[<\[【].*[>\]】]", re.DOTALL)
_TRUSTED = ("system", "developer", "assistant")
"""Others may be tools, under whatever name a template has for them: what they say is cut."""


class ControlTokens:
    """Knows the control tokens of one tokenizer: its added tokens in brackets, as `<|im_end|>`,
    `</think>` or `[INST]`."""

    def __init__(self, added_tokens: Iterable[str]) -> None:
        texts = [text for text in added_tokens if _LOOKS_LIKE_CONTROL.fullmatch(text)]
        longest = sorted(texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest)) or r"(?!)")

    def sanitize(self, messages: Iterable[Message]) -> list[Message]:
        """Returns messages in which the control tokens of users and tools are cut."""
        return [m if m["role"] in _TRUSTED else self._of(m) for m in messages]

    def _of(self, message: Message) -> Message:
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self.cut(content)}
        if not isinstance(content, list):
            return message
        parts = [
            {**part, "text": self.cut(part["text"])} if "text" in part else part for part in content
        ]
        return {**message, "content": parts}

    def cut(self, text: str) -> str:
        """Returns a text with a mark within each control token. Marks of its own are left out."""
        text = text.replace(MARK, "")
        return self._pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], text)

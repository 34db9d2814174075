"""Takes a list of prompts apart, so that each is placed by itself.

    "prompt": ["text", "text", ...]      or      "prompt": [[1, 2], [3], ...]

Prompts beyond `MAX_PARTS` go where an earlier one goes, in turn: prompt i is of part i modulo the
number of parts. What an item is, is not looked at: nodes refuse what is none of the two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from router.request.first_items import reader_of_first
from router.request.prompt_blocks import MOST_BYTES, hash_blocks
from router.request.prompt_text import PromptText

MAX_PARTS = 16
_MOST_PROMPTS = 1024
"""The router looks at nothing of more, and counts one more."""
_SEVERAL = re.compile(rb'[ \t\r\n]*\[[ \t\r\n]*["\[]')
"""Matches the beginning of a list of texts, or of lists: several prompts."""
_NOTHING = msgspec.Raw(b"")
_read_prompts = reader_of_first(_MOST_PROMPTS + 1, msgspec.Raw)


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Is one prompt, or several that are placed as one. `num_tokens` is a guess for all of them;
    `prefix_blocks` are of the first (`router.request.prompt_blocks`)."""

    num_tokens: int
    prefix_blocks: tuple[int, ...]


def several_prompts(raw: msgspec.Raw | None) -> list[msgspec.Raw]:
    """Returns the prompts of a list of texts, or of lists; nothing for a prompt that is one."""
    if raw is None or not _SEVERAL.match(memoryview(raw)):
        return []
    try:
        return _read_prompts(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []


def parts_of(prompts: Sequence[msgspec.Raw], seed: int) -> tuple[PromptPart, ...]:
    """Returns the parts of two prompts or more; `seed` is that of their blocks. A list that is too
    long has none: it is placed as one prompt, and no node answers it."""
    if not 2 <= len(prompts) <= _MOST_PROMPTS:
        return ()
    found = []
    for index in range(min(len(prompts), MAX_PARTS)):
        texts = [PromptText.of(_NOTHING, prompt) for prompt in prompts[index::MAX_PARTS]]
        blocks = hash_blocks(texts[0].beginning(MOST_BYTES // MAX_PARTS), seed)
        found.append(PromptPart(sum(text.num_tokens for text in texts), blocks))
    return tuple(found)

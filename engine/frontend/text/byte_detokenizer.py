"""Turns tokens that are bytes into text, by a table, where a tokenizer's decoder only joins bytes.

With byte-level BPE (GPT-2, Llama 3, Qwen, DeepSeek) the text of an answer is that of its tokens'
bytes, one behind the other. Most tokens are whole characters and have one text wherever they stand:
looking it up takes a tenth of the time in which the tokenizer decodes a window again. What is left
are tokens with parts of characters, which wait until the character is complete. Bytes that are no
UTF-8 become U+FFFD as the tokenizer writes them, one for each longest beginning of a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from engine.frontend.text.detokenizer import Detokenizer, TokenDecoder, TokenJoiner
from engine.frontend.text.text_options import TextOptions

_new_decoder = codecs.getincrementaldecoder("utf-8")


class ByteTexts:
    """Keeps what tokens are, found when they are first asked for. `bytes_of` gives a token's bytes;
    `special_ids` have none where they are not shown."""

    def __init__(self, bytes_of: Callable[[int], bytes], special_ids: frozenset[int]) -> None:
        self._bytes_of = bytes_of
        self._special_ids = special_ids
        self.whole: tuple[dict[int, str], dict[int, str]] = ({}, {})
        """Texts of tokens that are whole characters: with special tokens hidden, and shown."""
        self._parts: dict[int, bytes] = {}

    def bytes_of(self, token_id: int, *, skips_special: bool) -> bytes:
        """Returns the bytes of a token that is not among the whole ones, or not yet."""
        if skips_special and token_id in self._special_ids:
            self.whole[0][token_id] = ""
            return b""
        if (part := self._parts.get(token_id)) is not None:
            return part
        data = self._bytes_of(token_id)
        try:
            self.whole[not skips_special][token_id] = data.decode()
        except UnicodeDecodeError:
            self._parts[token_id] = data
        return data


class ByteDetokenizer:
    """Forms the text of one request's output, as `Detokenizer` does."""

    def __init__(self, texts: ByteTexts, options: TextOptions) -> None:
        self._texts = texts
        self._skips_special = options.skip_special_tokens
        self._whole = texts.whole[not self._skips_special]
        self._decoder = _new_decoder("replace")
        self._is_open = False
        """A character has begun and is not complete."""

    def push(self, token_id: int) -> str:
        """Takes one token and returns the new text, possibly none."""
        if not self._is_open and (text := self._whole.get(token_id)) is not None:
            return text
        data = self._texts.bytes_of(token_id, skips_special=self._skips_special)
        text = self._decoder.decode(data)
        self._is_open = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Returns what was kept back: no more tokens will come, or none that complete it."""
        self._is_open = False
        return self._decoder.decode(b"", final=True)


@runtime_checkable
class _ByteLevel(Protocol):
    byte_texts: ByteTexts | None


def create_detokenizer(
    decoder: TokenDecoder, options: TextOptions, before: Sequence[int]
) -> TokenJoiner:
    """Returns what forms the text of one output, behind the text of the tokens `before`."""
    texts = decoder.byte_texts if isinstance(decoder, _ByteLevel) else None
    return (
        Detokenizer(decoder, options, before) if texts is None else ByteDetokenizer(texts, options)
    )

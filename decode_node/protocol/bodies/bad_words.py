"""The words that a client forbids, as the tokens that spell them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.contracts.errors import check
from engine.contracts.sampling_params import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS

EncodeAll = Callable[[Sequence[str]], list[list[int]]]
"""Tokenises many texts, without special tokens."""


def spell_bad_words(words: Sequence[str], encode: EncodeAll) -> tuple[tuple[int, ...], ...]:
    """Returns each word's tokens as they are at the beginning of a text, and as they are after a
    space where that is another token in front and as many in all. Raises `InvalidRequest`.
    """
    name = "bad_words"
    check(len(words) <= MAX_BAD_WORDS, name, f"has {len(words)}, more than {MAX_BAD_WORDS}")
    bare = [word.lstrip() for word in words]
    for word in bare:
        check(
            0 < len(word) <= MAX_BAD_WORD_LENGTH,
            name,
            f"must have 1 to {MAX_BAD_WORD_LENGTH} characters each, and not only spaces",
        )
    if not bare:
        return ()
    found: dict[tuple[int, ...], None] = {}
    encoded = encode([*bare, *(" " + word for word in bare)])
    for plain, spaced in zip(encoded[: len(bare)], encoded[len(bare) :], strict=True):
        check(len(plain) > 0, name, "has a word that this model cannot write")
        found[tuple(plain)] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found[tuple(spaced)] = None
    return tuple(found)

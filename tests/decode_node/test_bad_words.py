"""Bad words become the tokens that spell them, in front of a text and behind a space."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from decode_node.protocol.bodies.bad_words import spell_bad_words
from engine.contracts.errors import InvalidRequest
from engine.contracts.sampling_params import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS
from tests.decode_node.http_node import chat_tokenizer

TABLE = {
    "one": [5],
    " one": [6],
    "two": [5, 7],
    " two": [8, 7],
    "longer": [9],
    " longer": [3, 9],
    "same": [4, 1],
    " same": [4, 2],
}


def encode(texts: Sequence[str]) -> list[list[int]]:
    return [TABLE[text] for text in texts]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["one"], ((5,), (6,))),
        (["two"], ((5, 7), (8, 7))),
        (["longer"], ((9,),)),
        (["same"], ((4, 1),)),
        (["  one", "one"], ((5,), (6,))),
        (["two", "one"], ((5, 7), (8, 7), (5,), (6,))),
        ([], ()),
    ],
)
def test_both_spellings(words: list[str], expected: tuple[tuple[int, ...], ...]) -> None:
    """The second one counts when another token is in front and there are as many."""
    assert spell_bad_words(words, encode) == expected


def test_with_a_real_tokenizer() -> None:
    tokenizer = chat_tokenizer()
    (plain, *spaced) = spell_bad_words(["dog"], tokenizer.encode_all)
    assert tokenizer.decode(plain) == "dog"
    assert all(tokenizer.decode(word) == " dog" for word in spaced)


@pytest.mark.parametrize(
    "words",
    [[""], ["  "], ["x" * (MAX_BAD_WORD_LENGTH + 1)], ["one"] * (MAX_BAD_WORDS + 1)],
)
def test_what_is_no_word_is_refused(words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        spell_bad_words(words, encode)
    assert caught.value.param == "bad_words"


def test_a_word_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot write"):
        spell_bad_words(["one"], lambda texts: [[] for _ in texts])

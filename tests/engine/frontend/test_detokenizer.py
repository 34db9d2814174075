"""Streaming text equals whole text, whatever the tokens and however they arrive."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders

from engine.frontend.text.byte_detokenizer import ByteDetokenizer, create_detokenizer
from engine.frontend.text.detokenizer import REPLACEMENT, Detokenizer, TokenJoiner
from engine.frontend.text.stop_strings import StopStringMatcher
from engine.frontend.text.text_options import TextOptions
from engine.frontend.tokenizer import Tokenizer
from tests.engine.frontend.small_tokenizers import (
    byte_fallback,
    byte_level,
    byte_level_backend,
)

Make: TypeAlias = Callable[[Tokenizer], TokenJoiner]
FAMILIES = [byte_level, byte_fallback]
TEXTS = st.text(
    alphabet=st.one_of(
        st.sampled_from("abc the ßü日本👩‍🇩🇪\u200d\ufffd \n"), st.characters(codec="utf-8")
    ),
    max_size=80,
)


MAKERS = {
    "by a window": Detokenizer,
    "as served": lambda tokenizer: create_detokenizer(tokenizer, TextOptions(), ()),
}


both = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def stream(make: Make, tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = make(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@both
@pytest.mark.parametrize("family", FAMILIES)
@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_text_survives_token_by_token(make: Make, family, text: str) -> None:
    tokenizer = family()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(make, tokenizer, ids)) == tokenizer.decode(ids)


@both
@given(ids=st.lists(st.integers(0, byte_level().vocab_size - 1), max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_tokens_give_the_whole_text(make: Make, ids: list[int]) -> None:
    """Broken UTF-8 and special tokens may stand anywhere among them."""
    tokenizer = byte_level()
    assert "".join(stream(make, tokenizer, ids)) == tokenizer.decode(ids)


@both
@given(text=TEXTS.filter(lambda text: REPLACEMENT not in text))
@settings(max_examples=150, deadline=None)
def test_no_piece_has_half_a_character(make: Make, text: str) -> None:
    tokenizer = byte_level()
    pieces = stream(make, tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert not any(REPLACEMENT in piece for piece in pieces)


@both
def test_an_unfinished_character_is_given_at_the_end(make: Make) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("x日", add_special_tokens=False)
    detokenizer = make(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in ids[:-1]]
    assert "".join(pieces) == "x"
    assert detokenizer.flush() == REPLACEMENT


@pytest.mark.parametrize("skips", [True, False])
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_table_gives_what_the_tokenizer_does(skips: bool, data: st.DataObject) -> None:
    """Added tokens may have characters that stand for bytes, or for none; ids may be unknown."""
    tokenizer = with_added_tokens()
    shown = create_detokenizer(tokenizer, TextOptions(skip_special_tokens=not skips), ())
    for token_id in tokenizer.added_token_ids.values():
        shown.push(token_id)  # What others are shown is nothing to this one.
    added = st.sampled_from(list(tokenizer.added_token_ids.values()))
    anything = st.one_of(added, st.integers(0, tokenizer.vocab_size + 2))
    ids = data.draw(st.lists(anything, max_size=40))
    options = TextOptions(skip_special_tokens=skips)
    detokenizer = create_detokenizer(tokenizer, options, ())
    assert isinstance(detokenizer, ByteDetokenizer)
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=skips)


def test_a_table_is_for_tokenizers_that_join_bytes_alone() -> None:
    assert byte_fallback().byte_texts is None
    backend = byte_level_backend()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert Tokenizer(backend).byte_texts is None


@cache
def with_added_tokens() -> Tokenizer:
    backend = byte_level_backend()
    backend.add_tokens(["é", "日", " two words ", AddedToken("<a b>", special=False)])
    backend.add_special_tokens(["<é>", "<|日|>"])
    return Tokenizer(backend)


def test_the_window_stays_short_also_without_any_valid_text() -> None:
    """A model gone wrong must not make the server decode its whole answer again and again."""
    garbage = byte_level().encode("日", add_special_tokens=False)[:1]
    words = byte_level().encode("the dog " * 200, add_special_tokens=False)
    decoded: list[int] = []

    class Counting:
        def decode(self, token_ids: list[int], **options: bool) -> str:
            decoded.append(len(token_ids))
            return byte_level().decode(token_ids)

    detokenizer = Detokenizer(Counting())
    for token_id in words:
        detokenizer.push(token_id)
    assert max(decoded) <= 17
    text = "".join(detokenizer.push(token_id) for token_id in garbage * 500) + detokenizer.flush()
    assert text == REPLACEMENT * 500
    assert max(decoded) <= 100


@both
def test_spaces_between_special_tokens_stay(make: Make) -> None:
    """Decoders strip a leading space; a window that begins with a special token must not."""
    tokenizer = byte_fallback()
    the = tokenizer.encode("the", add_special_tokens=False)
    special = tokenizer.encode("<|end|>", add_special_tokens=False)[-1:]
    ids = the + (special + the) * 30
    assert "".join(stream(make, tokenizer, ids)) == tokenizer.decode(ids)


@given(prompt=TEXTS, text=st.sampled_from(["the dog", "  the", "dog", "日本", " "]))
@settings(max_examples=150, deadline=None)
def test_a_text_that_goes_on_keeps_the_space_between(prompt: str, text: str) -> None:
    """Decoders strip a space at the beginning of a text, which is not where this one begins."""
    tokenizer = byte_fallback()
    before = tokenizer.encode(prompt, add_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if REPLACEMENT in tokenizer.decode(before[-16:]):
        return
    whole, given = tokenizer.decode(before + ids), tokenizer.decode(before)
    detokenizer = Detokenizer(tokenizer, before=before[-16:])
    new = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert given + new == whole


def test_a_character_that_the_text_before_leaves_open_is_not_gone_on_with() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("日", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, before=ids[:-1])
    assert detokenizer.push(ids[-1]) + detokenizer.flush() == tokenizer.decode(ids[-1:])


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_only_spaces_of_the_tokenizer_go_between_added_tokens(data: st.DataObject) -> None:
    """A space that the model wrote between two of them is text."""
    tokenizer = byte_level()
    space = tokenizer.encode(" ", add_special_tokens=False)
    added = st.sampled_from(list(tokenizer.added_token_ids.values()))
    ids = data.draw(st.lists(st.one_of(added, st.sampled_from(space)), max_size=40))
    options = TextOptions(skip_special_tokens=False, spaces_between_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, options)
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=False)


# Stop strings ---------------------------------------------------------------------------------


def cut(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """Cuts by definition: character by character, the first stop string that is complete
    ends it.
    """
    for end in range(1, len(text) + 1):
        for candidate in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(candidate):
                return text[: end - len(candidate)], candidate
    return text, None


STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


@given(pieces=st.lists(st.text(alphabet="abc", max_size=6), max_size=12), stop=STOPS)
@example(pieces=["ab", "cd"], stop=["bc", "abcd"])
@example(pieces=["a", "a", "b"], stop=["ab"])
@settings(max_examples=500, deadline=None)
def test_stop_strings_cut_the_same_however_text_arrives(pieces: list[str], stop: list[str]) -> None:
    expected, matched = cut("".join(pieces), tuple(stop))
    matcher = StopStringMatcher(tuple(stop))
    given_text = ""
    for piece in pieces:
        given_text += matcher.push(piece)
        assert expected.startswith(given_text), "text of a stop string leaked"
    given_text += matcher.flush()
    assert (given_text, matcher.matched) == (expected, matched)


@given(pieces=st.lists(st.text(alphabet="abc", max_size=6), max_size=12), stop=STOPS)
@settings(max_examples=200, deadline=None)
def test_a_match_that_is_kept_is_the_end_of_the_text(pieces: list[str], stop: list[str]) -> None:
    text = "".join(pieces)
    before, matched = cut(text, tuple(stop))
    matcher = StopStringMatcher(tuple(stop), keeps_match=True)
    found = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    assert (found, matcher.matched) == (before + (matched or ""), matched)


@given(text=st.text(alphabet="abx", max_size=40))
@settings(max_examples=200, deadline=None)
def test_no_more_is_kept_than_necessary(text: str) -> None:
    """Only the beginning of a stop string waits."""
    matcher = StopStringMatcher(("aab", "abb"))
    sent = "".join(matcher.push(char) for char in text)
    if matcher.matched is None:
        kept = text[len(sent) :]
        assert kept in ("", "a", "aa", "ab")


def test_without_stop_strings_text_passes_at_once() -> None:
    matcher = StopStringMatcher(())
    assert matcher.push("abc") == "abc"
    assert matcher.flush() == ""

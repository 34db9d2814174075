"""Shortens images and videos in the JSON text of a prompt, for what the router makes of it.

An image or a video in a `data:` URL, or an image in base64 under `data` as /v1/messages has it,
is text of any length, of which tokens cannot be guessed: in its place stands a name of the same
image, as long as the text of about a thousand tokens, and of a video about four thousand. Nothing
grows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import xxhash

_URL = b"data:image"
_VIDEO_URL = b"data:video"
_FIELD = b'"data":'
_LEAST = 64
"""Bytes of text under `data` that is taken for an image."""
_LONGEST = 4096
"""Bytes of a name: about 1024 tokens, as a picture of a million pixels has."""
_LONGEST_VIDEO = 4 * _LONGEST
_NAME = re.compile(rb"img-[0-9a-f]{32}")


def may_hold_images(text: bytes) -> bool:
    """Returns whether `shortened` has to look for them."""
    return _URL in text or _VIDEO_URL in text or _FIELD in text


def shortened(text: bytes) -> bytes:
    """Returns the text with a name in place of each image: the same object where there is none.

    Fixed words are searched for: an expression for all forms of images would take a third of a
    second for a long text, in which nothing else of this process goes on."""
    words = (
        _Word(text, _URL, _image_of_url),
        _Word(text, _VIDEO_URL, _image_of_url, _LONGEST_VIDEO),
        _Word(text, _FIELD, _image_of_field),
    )
    parts: list[bytes] = []
    done = 0
    while found := [word for word in words if word.at >= 0]:
        word = min(found, key=lambda word: word.at)
        start, end = word.image(text, word.at)
        following = max(word.at + 1, end)
        if end:
            parts += (text[done:start], _name(text[start:end], word.longest))
            done = end
        for each in words:
            each.move_to(following)
    return b"".join((*parts, text[done:])) if parts else text


def image_names(texts: Iterable[memoryview]) -> list[bytes]:
    """Returns the names in texts that were shortened, each once."""
    return list(dict.fromkeys(name for text in texts for name in _NAME.findall(text)))


class _Word:
    """Finds the places of a word, one after the other; -1 when there are no more. `image` returns
    where the image begins and ends that a place leads to; 0 for an end where it leads to none.
    `longest`: bytes of its name."""

    def __init__(
        self,
        text: bytes,
        word: bytes,
        image: Callable[[bytes, int], tuple[int, int]],
        longest: int = _LONGEST,
    ) -> None:
        self._text, self._word = text, word
        self.image = image
        self.longest = longest
        self.at = text.find(word)

    def move_to(self, start: int) -> None:
        if 0 <= self.at < start:
            self.at = self._text.find(self._word, start)


def _image_of_url(text: bytes, at: int) -> tuple[int, int]:
    behind = at + len(_URL)
    is_image = text[behind : behind + 2].removeprefix(b"\\").startswith(b"/")
    return at, _end_of_string(text, at) if is_image else 0


def _image_of_field(text: bytes, at: int) -> tuple[int, int]:
    colon = at + len(_FIELD)
    start = text.find(b'"', colon, colon + 2) + 1
    if not start or text[colon : start - 1] not in (b"", b" "):
        return at, 0
    end = _end_of_string(text, start)
    return start, end if end - start >= _LEAST else 0


def _end_of_string(text: bytes, start: int) -> int:
    end = text.find(b'"', start)
    return len(text) if end < 0 else end


def _name(image: bytes, longest: int) -> bytes:
    name = b"img-" + xxhash.xxh3_128_hexdigest(image).encode()
    length = min(len(image), longest)
    return (name * (length // len(name) + 1))[:length]

"""Shortens images in the JSON text of a prompt, for what the router makes of it.

An image in a `data:` URL, or in base64 under `data` as /v1/messages has it, is text of any length,
of which tokens cannot be guessed: in its place stands a name of the same image, as long as the text
of about a thousand tokens. Nothing grows.
"""

from __future__ import annotations

import re

import xxhash

_IMAGE = re.compile(rb'data:image\\?/[^"]*|(?<="data":")[^"]{64,}|(?<="data": ")[^"]{64,}')
_LONGEST = 4096
"""Bytes of a name: about 1024 tokens, as a picture of a million pixels has."""
_NAME = re.compile(rb"img-[0-9a-f]{32}")


def shortened(text: bytes) -> bytes:
    """Returns the text with a name in place of each image."""
    if b"data:image" not in text and b'"data":' not in text:
        return text
    return _IMAGE.sub(_name, text)


def image_names(text: bytes) -> list[bytes]:
    """Returns the names in a text that was shortened, each once."""
    return list(dict.fromkeys(_NAME.findall(text)))


def _name(found: re.Match[bytes]) -> bytes:
    image = found.group()
    name = b"img-" + xxhash.xxh3_128_hexdigest(image).encode()
    length = min(len(image), _LONGEST)
    return (name * (length // len(name) + 1))[:length]

"""Draws bytes that are nearly right: what is valid, damaged where formats are weak."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

COUNTS = (0, 1, 2, 7, 8, 63, 64, 255, 256, 4095, 65_535, 1 << 16, (1 << 31) - 1, 1 << 31)
HUGE = ((1 << 32) - 1, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_FORMS = ("<B", "<H", ">H", "<I", ">I", "<Q", ">Q")
WORDS = st.text(max_size=12) | st.sampled_from(
    [
        "",
        " ",
        "\x00",
        "\n",
        "\r\n",
        "\ud7ff",
        "\ufffd",
        "é",
        "日本",
        "../x",
        "/etc/passwd",
        "%s",
        "{}",
    ]
)
NUMBERS = st.one_of(
    st.sampled_from([*COUNTS, *HUGE, -1, -(1 << 31), -(1 << 63), 10**30]),
    st.integers(-300, 300),
    st.floats(),
)
SCALARS = st.none() | st.booleans() | NUMBERS | WORDS
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3)
)


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes], most: int = 4) -> bytes:
    """Draws bytes, and damages them `most` times at most: a bit, a number, a cut, a repetition, a
    piece of something else."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["bit", "byte", "number", "cut", "drop", "repeat", "insert"])):
            case "bit" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "byte" if data:
                data[at] = draw(st.integers(0, 255))
            case "number":
                form = draw(st.sampled_from(_FORMS))
                value = draw(st.sampled_from([*COUNTS, *HUGE])) % (1 << 8 * struct.calcsize(form))
                data[at : at + struct.calcsize(form)] = struct.pack(form, value)
            case "cut":
                del data[at:]
            case "drop":
                del data[at : at + draw(st.integers(1, 16))]
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 64))] * draw(st.integers(1, 9))
            case "insert":
                data[at:at] = draw(st.binary(max_size=16))
    return bytes(data)


@st.composite
def altered(draw: st.DrawFn, document: Any, most: int = 3) -> Any:
    """Draws a JSON document like `document`, in which some values are others, or gone, or there
    twice."""
    found = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(0, most))):
        places = list(_places(found))
        if not places:
            break
        holder, key = places[draw(st.integers(0, len(places) - 1))]
        match draw(st.sampled_from(["other", "gone", "wrapped", "renamed", "deep"])):
            case "other":
                holder[key] = draw(JSON)
            case "gone":
                del holder[key]
            case "wrapped":
                holder[key] = draw(st.sampled_from([[holder[key]], {"a": holder[key]}]))
            case "renamed" if isinstance(holder, dict):
                holder[draw(WORDS)] = holder.pop(key)
            case "deep":
                for _ in range(draw(st.sampled_from([3, 40, 200]))):
                    holder[key] = [holder[key]]
    return found


def _places(value: Any) -> Any:
    """Yields each (holder, key) below a value."""
    if not isinstance(value, dict | list):
        return
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def json_bytes(document: Any) -> bytes:
    """Returns JSON as lax writers write it: NaN, and halves of characters."""
    return json.dumps(document).encode()


def documents(*examples: Any, most: int = 3) -> st.SearchStrategy[bytes]:
    """Draws the text of an altered example; sometimes that text is damaged too."""
    text = st.sampled_from(examples).flatmap(lambda one: altered(one, most)).map(json_bytes)
    return st.one_of(text, text, damaged(text, 2))


def packed(*parts: tuple[str, bytes]) -> bytes:
    """Returns several files as one input."""
    return b"".join(
        struct.pack("<HI", len(name), len(data)) + name.encode() + data for name, data in parts
    )


def unpacked(data: bytes) -> list[tuple[str, bytes]]:
    """Reads what `packed` wrote; what is no such thing is no file."""
    found, at = [], 0
    while at + 6 <= len(data):
        name_bytes, count = struct.unpack_from("<HI", data, at)
        at += 6
        name = data[at : at + name_bytes].decode("latin-1")
        found.append((name, data[at + name_bytes : at + name_bytes + count]))
        at += name_bytes + count
    return found


def files(**kinds: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Draws a folder: a file of each name (`__` stands for a dot)."""
    pack: Callable[[dict[str, bytes]], bytes] = lambda drawn: packed(  # noqa: E731
        *((name.replace("__", "."), data) for name, data in drawn.items())
    )
    return st.fixed_dictionaries(kinds).map(pack)

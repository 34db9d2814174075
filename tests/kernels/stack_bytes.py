"""Read from compiled code how much memory each thread needs beside its registers.

What does not fit into them is spilled: stored, and loaded again. Results stay right, and a loop
that does so for all that it computes takes twenty times as long. The compiler writes what it has
set aside into the section `.nv.info` of the ELF file: a list of attributes, each of which begins
with its form, its name and, in the form of those that count here, the bytes behind it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SECTIONS = struct.Struct("<40xQ10xHHH")
"""Reads the head of an ELF file: where its table of sections begins, the size of an entry, their
number, and which section has their names."""
_SECTION = struct.Struct("<I20xQQ")
"""Reads an entry: where a section's name begins, where its content does, and its bytes."""
_SIZED, _FRAME_SIZE = 4, 0x11


def stack_bytes(cubin: bytes) -> int:
    """Returns the bytes of the function that needs most."""
    return max(_frame_sizes(_section(cubin, b".nv.info")), default=0)


def _section(cubin: bytes, name: bytes) -> bytes:
    """Raises LookupError: there is no section of that name."""
    begin, size, count, of_names = _SECTIONS.unpack_from(cubin)
    tables = [_SECTION.unpack_from(cubin, begin + size * index) for index in range(count)]
    names = tables[of_names][1]
    for at, content, length in tables:
        if cubin[names + at :].startswith(name + b"\0"):
            return cubin[content : content + length]
    raise LookupError(f"the file has no section {name.decode()}")


def _frame_sizes(info: bytes) -> Iterator[int]:
    at = 0
    while at < len(info):
        form, name, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            if name == _FRAME_SIZE:
                yield struct.unpack_from("<II", info, at)[1]
            at += size

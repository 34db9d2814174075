"""Counts how often a small kernel waits for memory before it asks for more.

A kernel of a step with few rows takes as long as memory takes to answer, once for each round. That
is one round, if all that a thread needs is asked for before anything is used:

    LDG.E.128 R4, [R2]           LDG.E.128 R4, [R2]
    LDG.E.128 R8, [R2+0x1000]    STS.128 [R30], R4              waits for the first
    STS.128 [R30], R4            LDG.E.128 R4, [R2+0x1000]      begins a second round

The assembler decides, and where it has the choice prefers few registers to few rounds.
"""

from __future__ import annotations

import re

from registers_in_flight import disassembled

_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?\s*(\S+) ?(.*?)\s*;")
_VECTOR = re.compile(r"LDG\.E\.(?:\w+\.)*(64|128)\b")
_REGISTER = re.compile(r"\bR(\d+)")
_READS_ALL = "ST", "RED", "BAR"


def rounds_of_loads(cubin: bytes) -> int:
    """Returns how many rounds compiled code has, by its vectors from global memory."""
    return rounds_in(disassembled(cubin))


def rounds_in(sass: str) -> int:
    """Counts rounds, in the order in which instructions lie."""
    rounds, asked, waited = 0, set[int](), True
    for name, operands in _INSTRUCTION.findall(sass):
        to, _, given = operands.partition(",")
        read = operands if name.startswith(_READS_ALL) else given
        if asked & {int(number) for number in _REGISTER.findall(read)}:
            asked, waited = set(), True
        if vector := _VECTOR.match(name):
            rounds += waited
            waited = False
            first = int(_REGISTER.findall(to)[0])
            asked.update(range(first, first + int(vector[1]) // 32))
    return rounds

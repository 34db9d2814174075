"""Find registers that are written while a product of four warps may still read them.

A product (HGMMA) runs on behind the instructions after it, and reads its first operand from
registers if that was computed. Until a wait has covered it, those registers must keep what they
have. Compilers have got that wrong (`tandem_kernels.warpgroup_waits`), with results that are wrong
now and then, so we read what they made:

    HGMMA ... R24, R64, gdesc[UR8], R24, gsb0     ends a group, which reads R64 to R67
    WARPGROUP.DEPBAR.LE gsb0, 0x3                 all groups but the last three have ended
    LDS R64, [R60+0x9800]                         a fault, if that group is one of the three

An assembler that cannot tell what products in flight still need waits for each, without an error,
and kernels take twice as long: loops of many products have fewer waits than products.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import triton.backends.nvidia

_DISASSEMBLER = Path(triton.backends.nvidia.__path__[0]) / "bin" / "nvdisasm"
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?(.*?)\s*;")
_BRANCH = re.compile(r"BRA.*\((\.L_x_\d+)\)")
_PRODUCT = re.compile(r"HGMMA\.\S+ R\d+, R(\d+), gdesc")
_ANY_PRODUCT = re.compile(r"[HQI]GMMA\.")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
_WRITE = re.compile(r"([A-Z0-9_.]+) R(\d+)\b")
_FEW = 3
"""Counts products that may well be waited for one by one."""
_WRITES_NOTHING = "ST", "RED", "LDGSTS", "BAR", "ATOMS.ARRIVE"


def multiplies_from_registers(ptx: str) -> bool:
    """Returns whether a product has its first operand in registers."""
    return any("wgmma.mma_async" in line and line.count("{") > 1 for line in ptx.splitlines())


def faults_of(cubin: bytes) -> list[str]:
    """Returns the instructions of compiled code that `written_in_flight` finds."""
    return _faults_found(written_in_flight, cubin)


def one_by_one(cubin: bytes) -> list[str]:
    """Returns the products of compiled code that `waited_for_alone` finds."""
    return _faults_found(waited_for_alone, cubin)


def _faults_found(find: Callable[[str], list[str]], cubin: bytes) -> list[str]:
    """Returns what `find` finds. Triton's cache, which keeps the code, keeps also that it found
    nothing, by the content of code and of this file: to disassemble takes half a second."""
    content = cubin + Path(__file__).read_bytes() + triton.__version__.encode()
    digest = hashlib.sha256(content).hexdigest()
    mark = Path(triton.knobs.cache.dir) / f"no-faults-{find.__name__}-{digest}"
    if mark.exists():
        return []
    faults = find(disassembled(cubin))
    if not faults:
        mark.touch()
    return faults


@lru_cache(maxsize=1)
def disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Where indirect branches go takes a third of the time to find, and changes no instruction.
        command = [str(_DISASSEMBLER), "-c", "-ndf", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def written_in_flight(sass: str) -> list[str]:
    """Returns the instructions of loops that write what a product in flight may have to read."""
    return [fault for body in _loops(sass) for fault in _faults(body)]


def waited_for_alone(sass: str) -> list[str]:
    """Returns the products of loops in which each is waited for before the next begins."""
    found = []
    for body in _loops(sass):
        products = [one for one in body if _ANY_PRODUCT.match(one)]
        waits = [one for one in body if _WAIT.match(one)]
        if len(products) > _FEW and len(waits) >= len(products):
            found += products
    return found


def _loops(sass: str) -> Iterator[list[str]]:
    """Yields the instructions of each loop that multiplies."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.match(line):
            instructions.append(instruction[1])
            branch = _BRANCH.match(instruction[1])
            if branch and branch[1] in labels:
                body = instructions[labels[branch[1]] :]
                if any(_ANY_PRODUCT.match(one) for one in body):
                    yield body


def _faults(body: list[str]) -> Iterator[str]:
    """Yields faults of two turns of a loop: the second finds what the first left in flight."""
    groups: list[set[int]] = []
    group: set[int] = set()
    for instruction in body * 2:
        if instruction.startswith("HGMMA"):
            if product := _PRODUCT.match(instruction):
                group |= _registers(int(product[1]), 4)
            if "gsb0" in instruction:
                groups.append(group)
                group = set()
        elif wait := _WAIT.match(instruction):
            groups = groups[max(0, len(groups) - int(wait[1], 16)) :]
        elif not instruction.startswith(_WRITES_NOTHING) and (write := _WRITE.match(instruction)):
            written = _registers(int(write[2]), _width(write[1]))
            if any(written & others for others in (*groups, group)):
                yield instruction


def _registers(first: int, count: int) -> set[int]:
    return set(range(first, first + count))


def _width(name: str) -> int:
    """Returns how many registers an instruction writes."""
    if ".128" in name:
        return 4
    return 2 if ".64" in name or "WIDE" in name else 1

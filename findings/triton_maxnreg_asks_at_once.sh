#!/usr/bin/env bash
# triton 3.7.1: a bound on registers that a kernel stays far below gives it more of them, and fewer waits for memory.
#
# A program of four warps multiplies 16 rows by 16 columns of 512 numbers. Each thread loads 16 vectors, and its PTX has
# all of these loads in front of what uses them. Without `maxnreg` the assembler takes 36 registers: a thread loads some
# vectors, waits until they have arrived in order to store them to shared memory, and only then loads the next ones. With
# `maxnreg=255`, the most that a thread can have anyway, it takes more, and loads all vectors before it waits once. A
# kernel that has little to do, as those of a decode step, takes as long as memory takes to answer for each of its waits.
#
# Seen on 2026-11-30 with Python 3.11, compiled for sm_90 on a machine without a GPU:
#     no bound: 36 registers, 4 rounds of loads
#     maxnreg=255: 78 registers, 1 round of loads
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check --quiet install 'triton==3.7.1'
cat > "$folder/rounds.py" <<'PYTHON'
import re
import subprocess
import sys
from pathlib import Path

import triton
import triton.backends.nvidia
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.backends.nvidia.__path__[0]) / "bin"
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*(\S+) ?(.*?)\s*;")


@triton.jit
def product(x, weight, out):
    lane, row, col = tl.arange(0, 512), tl.arange(0, 16), tl.arange(0, 16)
    by = tl.load(weight + col[None, :] * 512 + lane[:, None])
    given = tl.load(x + row[:, None] * 512 + lane[None, :])
    tl.store(out + row[:, None] * 16 + col[None, :], tl.dot(given, by))


def compiled(**options):
    signature = dict.fromkeys(("x", "weight", "out"), "*bf16")
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(3)}
    source = ASTSource(product, signature, constexprs={}, attrs=aligned)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options})
    Path("kernel.cubin").write_bytes(code.asm["cubin"])


def told_by(tool, option):
    return subprocess.run([TOOLS / tool, option, "kernel.cubin"], capture_output=True, text=True, check=True).stdout


def found(name, **options):
    compiled(**options)
    registers = int(re.search(r"REG:(\d+)", told_by("cuobjdump", "--dump-resource-usage"))[1])
    rounds, asked, waited = 0, set(), True
    for instruction, operands in INSTRUCTION.findall(told_by("nvdisasm", "-c")):
        to, _, given = operands.partition(",")
        read = operands if instruction.startswith("ST") else given
        if asked & set(map(int, re.findall(r"\bR(\d+)", read))):
            asked, waited = set(), True
        if instruction == "LDG.E.128":
            rounds, waited = rounds + waited, False
            asked |= set(range(int(to[1:]), int(to[1:]) + 4))
    print(f"{name}: {registers} registers, {rounds} round{'s' * (rounds > 1)} of loads")
    return registers, rounds


without, bounded = found("no bound"), found("maxnreg=255", maxnreg=255)
sys.exit(0 if without[0] < bounded[0] < 255 and without[1] > bounded[1] == 1 else 1)
PYTHON
cd "$folder" && TRITON_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" rounds.py

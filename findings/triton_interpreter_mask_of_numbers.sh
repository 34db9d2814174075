#!/usr/bin/env bash
# triton 3.9.0: with TRITON_INTERPRET=1, a mask of which a comparison of scalars is a part is refused.
#
# `mask=(lane < count) & (count >= least)` compiles, and 3.8.0 interprets it. In the interpreter a comparison of
# scalars keeps the integer type of its operands where it is spread over a block, so the mask becomes 32-bit integers;
# from 3.9.0 on, loads and stores take boolean masks alone: "mask has unsupported dtype". `(lane < count) & (lane >=
# least)`, of blocks alone, is taken. 86 of this repository's 265 interpreted tests met it. `mask.to(tl.int1)` is no
# way round, whereas comparing a block (`tl.zeros_like(lane) + count >= least`) is.
#
# Seen on 2026-11-29 with Python 3.11 and NumPy 2.4.6:
#     3.8.0 of blocks: [0, 0, 7, 7, 7, 0, 0, 0]
#     3.8.0 of a number: [7, 7, 7, 7, 7, 0, 0, 0]
#     3.9.0 of blocks: [0, 0, 7, 7, 7, 0, 0, 0]
#     3.9.0 of a number: InterpreterError("ValueError('mask has unsupported dtype')")
#     3.9.0 compiles both
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/masks.py" <<'PYTHON'
import triton
import triton.language as tl


@triton.jit
def of_blocks(address, count, least):
    lane = tl.arange(0, 8)
    x = address.to(tl.pointer_type(tl.int64)) + lane
    tl.store(x, 7, mask=(lane < count) & (lane >= least))


@triton.jit
def of_a_number(address, count, least):
    lane = tl.arange(0, 8)
    x = address.to(tl.pointer_type(tl.int64)) + lane
    tl.store(x, 7, mask=(lane < count) & (count >= least))


@triton.jit
def of_its_type(address, count, least):
    lane = tl.arange(0, 8)
    x = address.to(tl.pointer_type(tl.int64)) + lane
    tl.store(x, 7, mask=((lane < count) & (count >= least)).to(tl.int1))


@triton.jit
def of_a_block(address, count, least):
    lane = tl.arange(0, 8)
    x = address.to(tl.pointer_type(tl.int64)) + lane
    tl.store(x, 7, mask=(lane < count) & (tl.zeros_like(lane) + count >= least))
PYTHON
cat > "$folder/interpret.py" <<'PYTHON'
import masks
import numpy as np
import triton

for name in ("of_blocks", "of_a_number", "of_its_type", "of_a_block"):
    x = np.zeros(8, dtype=np.int64)
    try:
        getattr(masks, name)[(1,)](x.ctypes.data, 5, 2)
        found = x.tolist()
    except Exception as error:
        found = repr(error)
    print(triton.__version__, f"{name}: {found}".replace("_", " "))
PYTHON
cat > "$folder/compile.py" <<'PYTHON'
import masks
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for kernel in (masks.of_blocks, masks.of_a_number):
    types = {"address": "i64", "count": "i32", "least": "i32"}
    source = ASTSource(kernel, types, constexprs={}, attrs={})
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
print(triton.__version__, "compiles both")
PYTHON
for version in 3.8.0 3.9.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/python" -m pip --disable-pip-version-check --quiet install \
        "triton==$version" 'numpy==2.4.6'
    TRITON_INTERPRET=1 "$folder/$version/bin/python" "$folder/interpret.py"
done 2>/dev/null | tee "$folder/seen"
TRITON_CACHE_DIR="$folder/cache" "$folder/3.9.0/bin/python" "$folder/compile.py" 2>/dev/null |
    tee -a "$folder/seen"
grep -qF "3.8.0 of a number: [7, 7, 7, 7, 7, 0, 0, 0]" "$folder/seen"
grep -qF "3.9.0 of a number: InterpreterError(\"ValueError('mask has unsupported dtype')\")" \
    "$folder/seen"
grep -qF "3.9.0 compiles both" "$folder/seen"

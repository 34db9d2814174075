#!/usr/bin/env bash
# triton 3.6.0 and 3.9.0: `tl.dot` with input_precision="tf32" cuts float32 operands off, and its interpreter does not.
#
# One would expect operands to be rounded to the nearest of tf32's numbers, as PTX's `cvt.rna.tf32.f32` does. The
# machine code has no such instruction, for Ampere's `mma.sync` and for Hopper's `wgmma`: tensor cores get all 32 bits
# and leave out the last 13, so each factor is too small by some 2^-11 of itself, and sums of products do not average
# that out. Logits of 16,384 products were off by 4.4e-4 of themselves (H200, 3.6.0). With "tf32x3" the parts are cut
# off too, but the rest is multiplied as well. TRITON_INTERPRET=1 multiplies in float32, so interpreted tests cannot see
# it. One integer addition of 0x1000 to the bits of an operand in front of the product rounds it.
#
# Seen on 2026-11-29 with Python 3.11 and NumPy 2.4.6:
#     3.6.0 sm_80 tf32: 64 products of tf32, 0 roundings
#     3.6.0 sm_90 tf32: 8 products of tf32, 0 roundings
#     3.6.0 interpreted: 64.046875
#     3.9.0 sm_80 tf32: 64 products of tf32, 0 roundings
#     3.9.0 sm_90 tf32: 8 products of tf32, 0 roundings
#     3.9.0 interpreted: 64.046875
# where operands that are cut off give 64.
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/product.py" <<'PYTHON'
import triton
import triton.language as tl


@triton.jit
def multiply(x, y, out):
    at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    x = x.to(tl.pointer_type(tl.float32))
    y = y.to(tl.pointer_type(tl.float32))
    found = tl.dot(tl.load(x + at), tl.load(y + at), input_precision="tf32")
    tl.store(out.to(tl.pointer_type(tl.float32)) + at, found)
PYTHON
cat > "$folder/compile.py" <<'PYTHON'
import re

import triton
from product import multiply
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

types = dict.fromkeys(("x", "y", "out"), "i64")
for capability in (80, 90):
    source = ASTSource(multiply, types, constexprs={}, attrs={})
    target = GPUTarget("cuda", capability, 32)
    ptx = triton.compile(source, target=target, options={"num_warps": 4}).asm["ptx"]
    products = len(re.findall(r"mma[\w.]*\.tf32\.tf32", ptx))
    roundings = len(re.findall(r"cvt\.rna\.tf32", ptx))
    print(
        f"{triton.__version__} sm_{capability} tf32: {products} products of tf32, "
        f"{roundings} roundings"
    )
PYTHON
cat > "$folder/interpret.py" <<'PYTHON'
import numpy as np
import triton
from product import multiply

x = np.full((64, 64), 1 + 2**-11 + 2**-12, dtype=np.float32)
y, out = np.ones_like(x), np.zeros_like(x)
multiply[(1,)](x.ctypes.data, y.ctypes.data, out.ctypes.data)
print(triton.__version__, f"interpreted: {out[0, 0]}")
PYTHON
for version in 3.6.0 3.9.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/python" -m pip --disable-pip-version-check --quiet install \
        "triton==$version" 'numpy==2.4.6' setuptools
    TRITON_CACHE_DIR="$folder/cache" "$folder/$version/bin/python" "$folder/compile.py"
    TRITON_INTERPRET=1 "$folder/$version/bin/python" "$folder/interpret.py"
done 2> "$folder/errors" | tee "$folder/seen" || { cat "$folder/errors"; exit 1; }
test "$(grep -c " [1-9][0-9]* products of tf32, 0 roundings" "$folder/seen")" = 4
test "$(grep -c "interpreted: 64.046875" "$folder/seen")" = 2

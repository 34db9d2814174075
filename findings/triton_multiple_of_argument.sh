#!/usr/bin/env bash
# triton 3.7.1: `tl.multiple_of` of a kernel's integer argument is lost, without a word.
#
# An argument in `do_not_specialize` can only be known to be a multiple of eight if the kernel says so. Said of the
# argument itself (`shift = tl.multiple_of(shift, 8)`), nothing of it reaches the compiled code: bf16 numbers behind
# `shift` are stored one by one, two bytes in each instruction. Said by arithmetic (`vectors * 8`), the same store
# has 16 bytes. `tl.multiple_of` of a value that an operation gave is kept.
#
# Seen on 2026-11-28 with Python 3.11, compiled for sm_90 on a machine without a GPU:
#     multiple_of: st.global.b16
#     times 8: st.global.v4.b32
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check --quiet install 'triton==3.7.1'
cat > "$folder/stores.py" <<'PYTHON'
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit(do_not_specialize=["shift"])
def hinted(x, out, shift):
    shift = tl.multiple_of(shift, 8)
    lane = tl.arange(0, 1024)
    tl.store(out + shift + lane, tl.load(x + lane))


@triton.jit(do_not_specialize=["vectors"])
def computed(x, out, vectors):
    lane = tl.arange(0, 1024)
    tl.store(out + vectors * 8 + lane, tl.load(x + lane))


def store_of(kernel, argument):
    signature = {"x": "*bf16", "out": "*bf16", argument: "i32"}
    aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 1)}
    source = ASTSource(kernel, signature, constexprs={}, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return re.search(r"st\.global\.[a-z0-9.]+", compiled.asm["ptx"])[0]


by_hint, by_arithmetic = store_of(hinted, "shift"), store_of(computed, "vectors")
print(f"multiple_of: {by_hint}", f"times 8: {by_arithmetic}", sep="\n")
sys.exit(0 if (by_hint, by_arithmetic) == ("st.global.b16", "st.global.v4.b32") else 1)
PYTHON
cd "$folder" && TRITON_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" stores.py

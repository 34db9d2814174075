#!/usr/bin/env bash
# triton 3.6.0 and 3.9.0 (Gluon): products that are in flight at a loop's end make the assembler wait for every product.
#
# One would expect `warpgroup_mma(..., is_async=True)` to run on until its `warpgroup_mma_wait`, as its name says: also
# where an accumulator is handed to the next turn of a loop, so that products of one tile run beside the next tile's
# first ones. Where the loop itself changes that accumulator in between, as softmax does that is scaled anew for each
# tile, ptxas cannot prove its registers free and puts a wait behind each product of the kernel. Results are right, no
# error and no warning is shown: `ptxas -v` has a line of information, C7514, and Triton does not ask for it. A kernel
# of ours (36 products of scores and 4 of values a tile, on an H200 with 3.6.0) takes 3.9 ms so, and 3.3 where nothing
# is in flight at its loop's end.
#
# Seen on 2026-11-29 with Python 3.11:
#     3.6.0 in flight at the loop's end False: 12 products, 3 waits
#     3.6.0 in flight at the loop's end True: 12 products, 12 waits
#     3.9.0 in flight at the loop's end False: 12 products, 3 waits
#     3.9.0 in flight at the loop's end True: 12 products, 12 waits
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/kernel.py" <<'PYTHON'
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)


@gluon.jit
def walk(out, first, count, CARRIED: gl.constexpr, num_warps: gl.constexpr):
    scores_of: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    values_of: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    memory: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16)
    query = gl.allocate_shared_memory(gl.bfloat16, [64, 128], memory)
    rows = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], memory)
    none = gl.zeros([64, 64], gl.float32, scores_of)
    acc = gl.zeros([64, 128], gl.float32, values_of)
    in_flight = warpgroup_mma_init(acc)
    for turn in range(first, count):
        tile = rows.index(turn % 2)
        scores = warpgroup_mma(query, tile.permute((1, 0)), none, use_acc=False, is_async=True)
        if CARRIED:
            acc = warpgroup_mma_wait(1, deps=(in_flight,))
        scores = warpgroup_mma_wait(0, deps=(scores,))
        weights = gl.exp2(scores)
        shrink = gl.convert_layout(gl.max(weights, axis=1), gl.SliceLayout(1, values_of))
        share = gl.convert_layout(weights.to(gl.bfloat16), gl.DotOperandLayout(0, values_of, 2))
        acc = acc * shrink[:, None]
        in_flight = warpgroup_mma(share, tile, acc, is_async=True)
        if not CARRIED:
            acc = warpgroup_mma_wait(0, deps=(in_flight,))
            in_flight = warpgroup_mma_init(acc)
    acc = warpgroup_mma_wait(0, deps=(in_flight,))
    row = gl.arange(0, 64, gl.SliceLayout(1, values_of))
    column = gl.arange(0, 128, gl.SliceLayout(0, values_of))
    gl.store(out + row[:, None] * 128 + column[None, :], acc)
PYTHON
cat > "$folder/compile.py" <<'PYTHON'
import re
import subprocess
import tempfile
from pathlib import Path

import triton
import triton.backends.nvidia
from kernel import walk
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

tools = Path(triton.backends.nvidia.__path__[0]) / "bin"
for carried in (False, True):
    source = GluonASTSource(
        walk,
        {"out": "*fp32", "first": "i32", "count": "i32", "CARRIED": "constexpr", "num_warps": "constexpr"},
        constexprs={(3,): carried, (4,): 4},
        attrs={},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        sass = subprocess.run([tools / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    products = len(re.findall(r"HGMMA\.", sass))
    waits = len(re.findall(r"WARPGROUP\.DEPBAR", sass))
    print(f"{triton.__version__} in flight at the loop's end {carried}: {products} products, {waits} waits")
PYTHON
for version in 3.6.0 3.9.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/python" -m pip --disable-pip-version-check --quiet install "triton==$version" setuptools==80.9.0 || exit 1
    TRITON_CACHE_DIR="$folder/cache-$version" "$folder/$version/bin/python" "$folder/compile.py" || exit 1
done 2> "$folder/errors" | tee "$folder/seen" || { cat "$folder/errors"; exit 1; }
test "$(grep -c "False: 12 products, 3 waits" "$folder/seen")" = 2
test "$(grep -c "True: 12 products, 12 waits" "$folder/seen")" = 2

#!/usr/bin/env bash
# triton 3.6.0 and 3.9.0: a value that a loop loads two turns ahead ends all copies ahead of that loop, silently.
#
# One would expect `num_stages=4` to copy the operands of `tl.dot` three turns ahead whatever else the loop carries: a
# scale that is loaded in turn i for turn i + 1 (one variable handed on) changes nothing. Loaded for turn i + 2 (two
# variables, handed on one after the other, as one hides a longer latency by hand) it makes Triton leave the whole loop
# as it stands: operands are loaded where they are needed, and there is no asynchronous copy in the kernel. Results are
# right, and neither compiler nor launch says so; only the shared memory of the compiled kernel is that of one stage.
#
# Seen on 2026-11-29 with Python 3.11:
#     3.6.0 loaded 1 ahead: 32 copies ahead, 65536 bytes of shared memory
#     3.6.0 loaded 2 ahead: 0 copies ahead, 16384 bytes of shared memory
#     3.9.0 loaded 1 ahead: 32 copies ahead, 65536 bytes of shared memory
#     3.9.0 loaded 2 ahead: 0 copies ahead, 16384 bytes of shared memory
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/kernel.py" <<'PYTHON'
import triton
import triton.language as tl


@triton.jit
def product(x, weight, scales, out, turns, AHEAD: tl.constexpr):
    row = tl.arange(0, 64)
    lane = tl.arange(0, 64)
    given = x + row[:, None] * 4096 + lane[None, :]
    by = weight + row[:, None] * 4096 + lane[None, :]
    acc = tl.zeros([64, 64], tl.float32)
    scale = tl.load(scales)
    following = tl.load(scales + 1)
    for turn in range(turns):
        ahead = tl.load(scales + turn + AHEAD)
        acc += tl.dot(tl.load(given), tl.trans(tl.load(by))) * scale
        given += 64
        by += 64
        if AHEAD == 2:
            scale = following
            following = ahead
        else:
            scale = ahead
    tl.store(out + row[:, None] * 64 + lane[None, :], acc)
PYTHON
cat > "$folder/compile.py" <<'PYTHON'
import triton
from kernel import product
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

kinds = {"x": "*fp16", "weight": "*fp16", "scales": "*fp32", "out": "*fp32", "turns": "i32", "AHEAD": "constexpr"}
aligned = {(place,): [["tt.divisibility", 16]] for place in range(4)}
for ahead in (1, 2):
    source = ASTSource(product, kinds, {(5,): ahead}, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 4})
    copies = made.asm["ptx"].count("cp.async.cg")
    print(f"{triton.__version__} loaded {ahead} ahead: {copies} copies ahead, {made.metadata.shared} bytes of shared memory")
PYTHON
for version in 3.6.0 3.9.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/python" -m pip --disable-pip-version-check --quiet install "triton==$version" setuptools==80.9.0 || exit 1
    TRITON_CACHE_DIR="$folder/cache-$version" "$folder/$version/bin/python" "$folder/compile.py" || exit 1
done 2> "$folder/errors" | tee "$folder/seen" || { cat "$folder/errors"; exit 1; }
test "$(grep -c "2 ahead: 0 copies ahead" "$folder/seen")" = 2
! grep "1 ahead: 0 copies ahead" "$folder/seen"
test "$(grep -c "1 ahead: " "$folder/seen")" = 2

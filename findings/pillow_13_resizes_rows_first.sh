#!/usr/bin/env bash
# Pillow 13.0.0: resize() gives other pixels than Pillow 12 where an image's height shrinks much more than its width.
#
# It then resizes rows before columns, which is faster. Both passes round to whole shades and cut what is below 0 and
# above 255, so their order shows: bicubic and Lanczos curves overshoot. torchvision goes on with columns first. What a
# vision model with square inputs (SigLIP, CLIP) is given of a portrait thus depends on the Pillow of the server that
# prepared it, and differs from transformers' torchvision processors by more than the last bit. Others are as before.
#
# Expected: the same bytes from both, as no filter has changed.
# Seen on 2026-11-29 with Python 3.11, noise of 81 x 69 pixels in 70 x 14 (width x height), Lanczos:
#     another shade in 32 % of pixels, by at most 8; 69 x 81 in 14 x 70: the same bytes
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --disable-pip-version-check --quiet install)
"${pip[@]}" numpy
for version in 12.3.0 13.0.0; do
    "${pip[@]}" --target "$folder/$version" "pillow==$version"
done
cd "$folder"
cat > resize.py <<'PYTHON'
import numpy as np
from PIL import Image, __version__

shades = np.random.default_rng(0)
for name, size, new in (("wide", (81, 69), (70, 14)), ("tall", (69, 81), (14, 70))):
    pixels = shades.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    made = Image.fromarray(pixels).resize(new, Image.Resampling.LANCZOS)
    np.save(f"{name}_{__version__}.npy", np.asarray(made))
PYTHON
for version in 12.3.0 13.0.0; do
    PYTHONPATH="$folder/$version" venv/bin/python resize.py
done
venv/bin/python - <<'PYTHON'
import sys

import numpy as np

far = {}
for name in ("wide", "tall"):
    old, new = (np.load(f"{name}_{version}.npy").astype(int) for version in ("12.3.0", "13.0.0"))
    far[name] = abs(old - new)
    print(f"{name}: another shade in {(far[name] > 0).mean():.0%} of pixels, by at most {far[name].max()}")
sys.exit(not (far["wide"].max() > 1 and far["tall"].max() == 0))
PYTHON

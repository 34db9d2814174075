#!/usr/bin/env bash
# SGLang 0.5.23 and mlx-lm 0.32.2: the same Ring-mini-linear 2.0 forgets at other paces in each.
#
# Decays of lightning attention are in no tensor: a server computes them from the number of a layer. SGLang, where the
# authors wrote them themselves, has 1 - i / (layers - 1) for layer i from 0 on. The modeling code beside the weights has
# i - 1 in place of i, though it counts from 0 as well, and mlx-lm follows it, but for the first layer. Both answer
# fluently. In the last layer with a state, number 18 of 20, mlx-lm forgets twice as fast. Who ports the model must
# choose one; a comparison of outputs of two servers that differ shows this and no fault of either's kernels.
#
# Seen on 2026-11-29 with Python 3.11, torch 2.13 (CPU), mlx 0.32.4 (CPU), pace of layers 0, 1, 10 and 18:
#     SGLang 1.0000 0.9474 0.4737 0.0526
#     mlx-lm 1.0000 1.0000 0.5263 0.1053
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cd "$folder"
venv/bin/python -m pip --disable-pip-version-check --quiet install \
    'torch==2.13.0' 'mlx[cpu]==0.32.4' numpy
venv/bin/python -m pip --disable-pip-version-check --quiet install --no-deps \
    --target packages 'mlx-lm==0.32.2'
venv/bin/python -m pip --disable-pip-version-check --quiet download --no-deps \
    --dest wheels 'sglang==0.5.23'
cat > run.py <<'PYTHON'
import ast
import math
import sys
import types
import zipfile
from pathlib import Path

import mlx.core as mx
import torch

HEADS, LAYERS, ASKED = 16, 20, (0, 1, 10, 18)
NAME = "sglang/srt/layers/attention/linear/lightning_backend.py"


def sglang():
    """Runs the function that computes decays, without the imports of the server around it."""
    (wheel,) = Path("wheels").glob("sglang-*.whl")
    tree = ast.parse(zipfile.ZipFile(wheel).read(NAME))
    name = "_build_slope_tensor"
    found = next(one for one in ast.walk(tree) if getattr(one, "name", "") == name)
    found.decorator_list = []
    one_rank = types.SimpleNamespace(attn_tp_size=1, attn_tp_rank=0)
    names = {"torch": torch, "math": math, "get_parallel": lambda: one_rank}
    exec(compile(ast.Module([found], []), NAME, "exec"), names)
    slopes = names[name](HEADS, LAYERS, device="cpu")
    return [float(slopes[layer].flatten()[0]) for layer in ASKED]


def mlx_lm():
    """Takes the layer's class, and gives it what it needs for its decays alone."""
    tree = ast.parse(Path("packages/mlx_lm/models/bailing_moe_linear.py").read_text())
    name = "_get_slopes"
    found = next(one for one in ast.walk(tree) if getattr(one, "name", "") == name)
    names = {"mx": mx, "math": math}
    exec(compile(ast.Module([found], []), name, "exec"), names)
    layer = types.SimpleNamespace(num_attention_heads=HEADS, num_hidden_layers=LAYERS)
    slopes = []
    for index in ASKED:
        layer.layer_idx = index
        slopes.append(-float(names[name](layer).flatten()[0]))
    return slopes


fastest = 2 ** (-8 / HEADS)
paces = {"SGLang": sglang(), "mlx-lm": mlx_lm()}
said = {name: " ".join(f"{one / fastest:.4f}" for one in found) for name, found in paces.items()}
for name, text in said.items():
    print(name, text)
expected = {"SGLang": "1.0000 0.9474 0.4737 0.0526", "mlx-lm": "1.0000 1.0000 0.5263 0.1053"}
sys.exit(0 if said == expected else 1)
PYTHON
venv/bin/python run.py

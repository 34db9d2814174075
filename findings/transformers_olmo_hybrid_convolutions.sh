#!/usr/bin/env bash
# transformers 5.24.0: an OLMo Hybrid that is saved has its convolutions cut at other places than it was loaded with.
#
# A layer with a state has three convolutions in a checkpoint, of queries, keys and values, which become one when they are
# loaded. `save_pretrained` cuts that one into three equal parts. Values are twice as wide as keys (5760 and 2880
# channels in Olmo-Hybrid-7B), so each file has other channels than its name says. transformers reads them back, as it puts
# them behind each other; a server that takes each by its name and shape does not.
#
# Seen on 2026-11-29 with Python 3.11, torch 2.13 (CPU):
#     q_proj 32 k_proj 32 v_proj 48
#     q_conv1d 38 k_conv1d 38 v_conv1d 36
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check --quiet install \
    'transformers==5.24.0' 'torch==2.13.0' safetensors
cd "$folder"
cat > run.py <<'PYTHON'
import json
import struct
import sys

from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

OlmoHybridForCausalLM(
    OlmoHybridConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        layer_types=["linear_attention", "full_attention"], linear_key_head_dim=8, linear_value_head_dim=12,
        eos_token_id=0, pad_token_id=0,
    )
).save_pretrained("out")
with open("out/model.safetensors", "rb") as file:
    tensors = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))


def rows(kind):
    return [tensors[f"model.layers.0.linear_attn.{part}_{kind}.weight"]["shape"][0] for part in "qkv"]


for kind in ("proj", "conv1d"):
    print(*(f"{part}_{kind} {count}" for part, count in zip("qkv", rows(kind))))
sys.exit(0 if (rows("proj"), rows("conv1d")) == ([32, 32, 48], [38, 38, 36]) else 1)
PYTHON
venv/bin/python run.py

#!/usr/bin/env bash
# amd-quark 0.13 with transformers 5.24.0: experts of a mixture stay in bfloat16, and config.json says that they do not.
#
# transformers 5 keeps the experts of a layer in one tensor, which is no `nn.Linear`. `ModelQuantizer` quantises linear
# layers alone, without a warning, and `export_safetensors` writes a `global_quant_config` for all layers but the head.
# A server that believes it looks for scales that are not there; a checkpoint that should have shrunk to a half or a
# quarter has not, as experts are most of it. `quark.torch.utils.llm.preprocess_for_quantization(model)`, called first,
# makes linear layers of them.
#
# Seen on 2026-11-28 with Python 3.11, torch 2.13 (CPU); takes minutes, as the package compiles a kernel when imported:
#     exclude: ['lm_head']
#     experts.down_proj: BF16 q_proj.weight: F8_E4M3
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check --quiet install \
    'amd-quark==0.13' 'transformers==5.24.0' 'torch==2.13.0' accelerate
cd "$folder"
cat > run.py <<'PYTHON'
import json
import struct
import sys

import torch
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

torch.manual_seed(0)
model = Qwen3MoeForCausalLM(
    Qwen3MoeConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=4, num_experts_per_tok=2,
    )
).to(torch.bfloat16).eval()
quantizer = ModelQuantizer(LLMTemplate.get("qwen3_moe").get_config(scheme="ptpc_fp8"))
texts = torch.utils.data.DataLoader([torch.randint(0, 256, (32,)) for _ in range(2)], batch_size=1)
export_safetensors(quantizer.freeze(quantizer.quantize_model(model, texts)), "out")
exclude = json.load(open("out/config.json"))["quantization_config"]["exclude"]
with open("out/model.safetensors", "rb") as file:
    tensors = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
experts = {tensor["dtype"] for name, tensor in tensors.items() if name.endswith("experts.down_proj")}
queries = {tensor["dtype"] for name, tensor in tensors.items() if name.endswith("q_proj.weight")}
print("exclude:", exclude)
print("experts.down_proj:", *experts, "q_proj.weight:", *queries)
sys.exit(0 if (exclude, experts, queries) == (["lm_head"], {"BF16"}, {"F8_E4M3"}) else 1)
PYTHON
venv/bin/python run.py

#!/usr/bin/env bash
# nvidia-modelopt 0.47.0 with transformers 5.14.1: EAGLE-3 heads are trained on features that were normalised twice, and
# servers normalise them once.
#
# In EAGLE-3 the embedding goes through `input_layernorm` and the model's fused feature through `hidden_norm`, before
# both enter attention side by side. ModelOpt takes transformers' `LlamaDecoderLayer` for the head's layer, whose forward
# applies `input_layernorm` to the feature; the hook that ModelOpt adds in front of attention then applies `hidden_norm`
# to that. `export_speculative_decoding` writes the form of SafeAILab's, SpecForge's and speculators' heads, which
# servers (vLLM's llama_eagle3.py, for one) compute with `hidden_norm` alone; nothing in config.json tells them apart.
# While the norm's weights are equal, as at the start, nothing differs; trained ones are not, and what is served is
# another network than the one that was trained and validated.
#
# Below, what ModelOpt's module makes of one token is compared with both forms, computed from the exported tensors.
#
# Seen on 2026-11-29 with Python 3.11, torch 2.13 (CPU):
#     normalised once: differs by 0.187
#     normalised twice: differs by 0.000
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check --quiet install \
    'nvidia-modelopt==0.47.0' 'transformers==5.14.1' 'torch==2.13.0' accelerate peft requests
cd "$folder"
cat > run.py <<'PYTHON'
import sys

import modelopt.torch.speculative as mtsp
import torch
import torch.nn.functional as F
from modelopt.torch.export import export_speculative_decoding
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

SIZE, HEADS, EPS = 64, 4, 1e-5
torch.manual_seed(0)
sizes = {"intermediate_size": 128, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": 16}
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=SIZE, num_hidden_layers=4, **sizes))
head = {
    "num_hidden_layers": 1, "use_aux_hidden_state": True, "use_last_layernorm": True, "draft_vocab_size": 128,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2], "torch_dtype": "float32", **sizes,
}
mtsp.convert(model, [("eagle", {"eagle_decoder_type": "llama", "eagle_architecture_config": head})])
module = model.eagle_module.float()
with torch.no_grad():
    for name, weight in module.named_parameters():  # As training would leave them: not all equal.
        if "norm" in name:
            weight.add_(0.3 * torch.randn_like(weight))
export_speculative_decoding(model, export_dir="head")
weights = load_file("head/model.safetensors")
embedding, feature = torch.randn(1, 1, SIZE), torch.randn(1, 1, SIZE)
with torch.no_grad():
    module._maybe_init_rope(device="cpu")
    theirs = module(feature, embedding, torch.zeros(1, 1, 1, 1))[1]


def norm(x, name):
    return F.rms_norm(x, (SIZE,), weights[f"layers.0.{name}.weight"], EPS)


def linear(x, name):
    return F.linear(x, weights[f"layers.0.{name}.weight"])


def layer(normed):
    """What one token becomes, which attends to itself alone: it reads its own value."""
    x = torch.cat([norm(embedding, "input_layernorm"), normed], dim=-1)
    stream = feature + linear(linear(x, "self_attn.v_proj"), "self_attn.o_proj")
    y = norm(stream, "post_attention_layernorm")
    return stream + linear(F.silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj"), "mlp.down_proj")


once = layer(norm(feature, "hidden_norm"))
twice = layer(norm(norm(feature, "input_layernorm"), "hidden_norm"))
differences = [(theirs - found).abs().max().item() for found in (once, twice)]
print(f"normalised once: differs by {differences[0]:.3f}")
print(f"normalised twice: differs by {differences[1]:.3f}")
sys.exit(0 if differences[0] > 0.01 and differences[1] < 1e-4 else 1)
PYTHON
venv/bin/python run.py

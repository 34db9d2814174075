#!/usr/bin/env bash
# transformers 5.24.0: what an image's tokens see of it in Gemma 4 12B (Gemma4Unified) depends on generate()'s cache.
#
# With use_bidirectional_attention "vision" tokens of an image see those behind them. With a static cache generate()
# builds masks by the class's own create_masks_for_generate: in layers with a window alone, and no farther than the
# window, as Gemma 4's other sizes and vLLM (its pull request 47217) have it. With the usual cache the model's forward()
# builds them: in all layers, whatever the window. Gemma4ForConditionalGeneration has one way in both.
#
# Expected: logits of both caches agree to float32's precision, as they do for Gemma 4.
# Seen on 2026-11-29 with Python 3.11, torch 2.13 (CPU), an image of 20 tokens, a window of 8, random weights:
#     gemma4: largest difference of logits 0
#     gemma4_unified: 0.92
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check --quiet install 'torch==2.13.0' pillow 'transformers==5.24.0'
cd "$folder"
cat > run.py <<'PYTHON'
import sys

import torch
from transformers import (
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    __version__,
)

image, start, end = 120, 121, 122
text = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "max_position_embeddings": 512,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 8,
    "use_bidirectional_attention": "vision", "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None,
}
whole = {
    "image_token_id": image, "video_token_id": 123, "boi_token_id": start, "eoi_token_id": end, "audio_token_id": 119,
    "audio_config": None,
}
tower = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 64,
}
patches = {
    "patch_size": 4, "pooling_kernel_size": 1, "mm_embed_dim": 32, "mm_posemb_size": 64, "output_proj_dims": 32,
}
models = {
    "gemma4": Gemma4ForConditionalGeneration(
        Gemma4Config(text_config={**text, "hidden_size_per_layer_input": 0}, vision_config=tower, **whole)
    ),
    "gemma4_unified": Gemma4UnifiedForConditionalGeneration(
        Gemma4UnifiedConfig(text_config=text, vision_config=patches, **whole)
    ),
}
ids = torch.tensor([[5, 6, 7, start, *[image] * 20, end, 9, 10]])
grids = {"gemma4": (10, 8), "gemma4_unified": (5, 4)}
inputs = {
    "mm_token_type_ids": (ids == image).long(),
    "attention_mask": torch.ones_like(ids),
}
wanted = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
largest = {}
for name, model in models.items():
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.15 * noise)
    model.eval()
    rows, columns = grids[name]
    inputs["pixel_values"] = torch.rand(1, rows * columns, 48)
    inputs["image_position_ids"] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)[None]
    found = [
        model.generate(ids, cache_implementation=cache, **inputs, **wanted).logits[0] for cache in (None, "static")
    ]
    largest[name] = float((found[0] - found[1]).abs().max())
    print(f"{__version__}: {name}: largest difference of logits {largest[name]:.2g}")
sys.exit(not (largest["gemma4"] < 1e-4 and largest["gemma4_unified"] > 1e-2))
PYTHON
venv/bin/python run.py

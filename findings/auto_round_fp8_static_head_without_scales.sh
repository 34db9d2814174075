#!/usr/bin/env bash
# auto-round 0.16.1: FP8_STATIC in the llm_compressor format leaves the head plain, and config.json calls it quantised.
#
# `AutoRound(model, scheme="FP8_STATIC")`, saved with `format="llm_compressor"`, writes `targets: ["Linear"]` and an
# empty `ignore` list, while `lm_head` stays in bfloat16 and has no scales. Its INT8_W8A8 export lists the head.
# transformers believes config.json: it makes scales for the head out of memory that nothing has written, says so in a
# report among others, and answers with numbers that mean nothing (NaN where this was seen). Servers that want a scale
# for each layer that config.json calls quantised refuse the folder. Add "lm_head" to `ignore` in config.json.
#
# Seen on 2026-11-29 with Python 3.11, transformers 5.14.1, compressed-tensors 0.20.1, torch 2.13 (CPU):
#     ignore: []
#     tensors of the head: ['lm_head.weight']
#     made by transformers: ['lm_head.input_scale', 'lm_head.weight_scale']
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check --quiet install \
    'auto-round==0.16.1' 'compressed-tensors==0.20.1' 'transformers==5.14.1' 'torch==2.13.0'
cd "$folder"
cat > run.py <<'PYTHON'
import json
import sys
from pathlib import Path

import torch
from auto_round import AutoRound
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def main():
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes)).to(torch.bfloat16).save_pretrained("plain")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1").save_pretrained("plain")
    texts = [{"input_ids": torch.randint(0, 128, (1, 16))} for _ in range(2)]
    rounding = AutoRound("plain", scheme="FP8_STATIC", iters=0, dataset=texts, nsamples=2, seqlen=16, device_map="cpu")
    rounding.quantize_and_save("fp8", format="llm_compressor")
    (config,) = Path("fp8").rglob("config.json")
    ignore = json.loads(config.read_text())["quantization_config"]["ignore"]
    print("ignore:", ignore)
    names = set()
    for path in config.parent.glob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            names |= set(tensors.keys())
    head = sorted(name for name in names if name.startswith("lm_head"))
    print("tensors of the head:", head)
    _, info = AutoModelForCausalLM.from_pretrained(config.parent, output_loading_info=True)
    made = sorted(info["missing_keys"])
    print("made by transformers:", made)
    as_seen = ([], ["lm_head.weight"], ["lm_head.input_scale", "lm_head.weight_scale"])
    sys.exit(0 if (ignore, head, made) == as_seen else 1)


if __name__ == "__main__":
    main()
PYTHON
HF_HUB_OFFLINE=1 venv/bin/python run.py

"""Tiny gpt-oss: windows on every other layer, sinks, and a gate whose limit is often reached."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tandem_kernels.reference.mxfp4 import BLOCK, BLOCK_BYTES
from tests.engine.models.family import YARN, Family

WINDOW = 17
NOT_CONVERTED = [
    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
]  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "head_dim": 16, "num_hidden_layers": 4, "sliding_window": WINDOW, "swiglu_limit": 1.0,
    "num_local_experts": 6, "num_experts_per_tok": 2,
    "rope_parameters": {**YARN, "truncate": False},
}  # fmt: skip
GPT_OSS_FAMILIES = {"gpt_oss": Family(GptOssForCausalLM, GptOssConfig, GPT_OSS)}


def publish(folder: Path, published: Path, meant: Path) -> None:
    """Writes the checkpoint with other experts twice: in MXFP4 as OpenAI publishes it, and in plain
    numbers as transformers reads those."""
    generator = torch.Generator().manual_seed(5)
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = plain[name] = tensor
            continue
        count, inputs, outputs = tensor.shape
        shape = count, outputs, inputs // BLOCK
        blocks, scales = (
            torch.randint(low, high, size, generator=generator, dtype=torch.uint8)
            for low, high, size in ((0, 256, (*shape, BLOCK_BYTES)), (121, 125, shape))
        )
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for to, tensors in ((published, stored), (meant, plain)):
        shutil.copytree(folder, to)
        save_file(tensors, to / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": NOT_CONVERTED,
    }
    (published / "config.json").write_text(json.dumps(config))

"""Writes a checkpoint of gpt-oss' shape as it is published: experts in MXFP4, the rest bf16.

The numbers are random, so tokens choose experts uniformly. There is one file for each layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tandem_kernels.reference.mxfp4 import BLOCK, BLOCK_BYTES

_STD = 0.02
_SCALES = 118, 122
"""Exponents at which random numbers of 4 bits have about the same size."""
_TYPES = {"BF16": torch.bfloat16, "U8": torch.uint8}


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to write. `fill`: its numbers."""

    name: str
    shape: tuple[int, ...]
    fill: Literal["normal", "ones", "numbers", "scales"] = "normal"

    @property
    def dtype(self) -> str:
        return "U8" if self.fill in ("numbers", "scales") else "BF16"

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * _TYPES[self.dtype].itemsize

    def make(self, generator: torch.Generator) -> Tensor:
        options = {"dtype": _TYPES[self.dtype], "device": generator.device}
        if self.fill == "ones":
            return torch.ones(self.shape, **options)  # type: ignore[call-overload, no-any-return]
        made = torch.empty(self.shape, **options)  # type: ignore[call-overload]
        if self.fill == "normal":
            return made.normal_(0.0, _STD, generator=generator)
        low, high = _SCALES if self.fill == "scales" else (0, 255)
        return made.random_(low, high + 1, generator=generator)


def planned_layer(config: dict[str, int], index: int) -> Iterator[Planned]:
    """Yields the tensors of one layer."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    heads, count = config["num_attention_heads"], config["num_local_experts"]
    queries, keys = (
        config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    layer = f"model.layers.{index}"
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield Planned(f"{layer}.{norm}.weight", (hidden,), "ones")
    for name, shape in (
        ("self_attn.q_proj", (queries, hidden)),
        ("self_attn.k_proj", (keys, hidden)),
        ("self_attn.v_proj", (keys, hidden)),
        ("self_attn.o_proj", (hidden, queries)),
        ("mlp.router", (count, hidden)),
    ):
        yield Planned(f"{layer}.{name}.weight", shape)
        yield Planned(f"{layer}.{name}.bias", shape[:1])
    yield Planned(f"{layer}.self_attn.sinks", (heads,))
    for name, outputs, inputs in (
        ("gate_up_proj", 2 * width, hidden),
        ("down_proj", hidden, width),
    ):
        blocks = count, outputs, inputs // BLOCK
        yield Planned(f"{layer}.mlp.experts.{name}_blocks", (*blocks, BLOCK_BYTES), "numbers")
        yield Planned(f"{layer}.mlp.experts.{name}_scales", blocks, "scales")
        yield Planned(f"{layer}.mlp.experts.{name}_bias", (count, outputs))


def write_file(path: Path, tensors: list[Planned], generator: torch.Generator) -> None:
    """Writes a safetensors file, holding one tensor at a time."""
    header, end = {}, 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, end),
        }  # fmt: skip
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(tensor.make(generator).cpu().view(torch.uint8).numpy().data)


def write_checkpoint(folder: Path, config: dict[str, object], *, device: str = "cpu") -> None:
    """Writes config.json and the weights. `config`: of a `GptOssForCausalLM`."""
    sizes = {name: value for name, value in config.items() if isinstance(value, int)}
    generator = torch.Generator(device).manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    table = sizes["vocab_size"], sizes["hidden_size"]
    parts = [
        [
            Planned("model.embed_tokens.weight", table),
            Planned("model.norm.weight", table[1:], "ones"),
            Planned("lm_head.weight", table),
        ],
        *(list(planned_layer(sizes, index)) for index in range(sizes["num_hidden_layers"])),
    ]
    files = {}
    for index, tensors in enumerate(parts):
        name = f"model-{index:05}-of-{len(parts):05}.safetensors"
        write_file(folder / name, tensors, generator)
        files.update(dict.fromkeys((tensor.name for tensor in tensors), name))
        print(f"\r{index + 1} of {len(parts)} files", end="", flush=True)
    print()
    index_text = json.dumps({"metadata": {}, "weight_map": files})
    (folder / "model.safetensors.index.json").write_text(index_text)

"""Tiny random checkpoints of models that see images, and what transformers computes with them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from engine.images.image_input import ImagePixels, ImageSpan

VOCAB = 128
IMAGE, START, END = 120, 121, 122
MAX_LEN = 512
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
_WHOLE = {
    "image_token_id": IMAGE,
    "video_token_id": 123,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_CLASSES: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "qwen2_5": (Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig),
    "qwen3": (Qwen3VLForConditionalGeneration, Qwen3VLConfig),
}
_PATCH = {"qwen2_5": 14, "qwen3": 16}


def _config(kind: str) -> Any:
    if kind == "qwen2_5":
        vision = {**_TOWER, "depth": 3, "fullatt_block_indexes": [1]}
        text = {**_TEXT, "rope_parameters": _MROPE}
    else:
        vision = {**_TOWER, "depth": 3, "deepstack_visual_indexes": [0, 1]}
        vision["num_position_embeddings"] = 25
        rope = {**_MROPE, "mrope_interleaved": True}
        text = {**_TEXT, "head_dim": 16, "rope_parameters": rope}
    return _CLASSES[kind][1](text_config=text, vision_config=vision, **_WHOLE)


def save_checkpoint(kind: str, folder: Path) -> Path:
    """Saves random weights, large enough that attention and positions matter."""
    torch.manual_seed(5)
    model = _CLASSES[kind][0](_config(kind))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            is_vector = parameter.dim() == 1
            parameter.copy_(1.0 + 0.2 * noise if is_vector else 0.15 * noise)
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Picture:
    """An image after preprocessing: [patches, 3, size, size] uint8, and its grid of tokens."""

    rows: int
    columns: int
    patches: np.ndarray

    @property
    def pixels(self) -> ImagePixels:
        return ImagePixels(self.digest, self.rows, self.columns, self.patches.tobytes())

    @property
    def digest(self) -> bytes:
        return bytes([self.rows, self.columns, *self.patches.reshape(-1)[:30].tolist()])

    def pixel_values(self, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
        """Returns [patches, 3 * 2 * size * size] float32, as the reference processor has them."""
        scaled = (self.patches.astype(np.float64) * (1 / 255)).astype(np.float32)
        shape = (1, 3, 1, 1)
        normal = (scaled - np.float32(mean).reshape(shape)) / np.float32(std).reshape(shape)
        frames = np.repeat(normal[:, :, None], 2, axis=2)
        return torch.from_numpy(frames.reshape(len(frames), -1))


def picture(kind: str, rows: int, columns: int, seed: int) -> Picture:
    size = _PATCH[kind]
    numbers = np.random.default_rng(seed)
    patches = numbers.integers(0, 256, (rows * columns * 4, 3, size, size), dtype=np.uint8)
    return Picture(rows, columns, patches)


@dataclass(frozen=True)
class Prompt:
    """Tokens, images, and where these stand."""

    tokens: list[int]
    pictures: list[Picture]

    @property
    def spans(self) -> tuple[ImageSpan, ...]:
        starts = [i + 1 for i, token in enumerate(self.tokens) if token == START]
        return tuple(
            ImageSpan(start, one.rows, one.columns, one.digest)
            for start, one in zip(starts, self.pictures, strict=True)
        )

    @property
    def pixels(self) -> tuple[ImagePixels, ...]:
        return tuple({one.digest: one.pixels for one in self.pictures}.values())


def prompt(pictures: list[Picture], seed: int, num_text: int = 7) -> Prompt:
    """Returns text with the images between its parts."""
    numbers = random.Random(seed)

    def text() -> list[int]:
        return [numbers.randrange(1, 110) for _ in range(num_text)]

    tokens = text()
    for one in pictures:
        tokens += [START, *[IMAGE] * (one.rows * one.columns), END, *text()]
    return Prompt(tokens, pictures)


@torch.no_grad()
def _generated(folder: Path, kind: str, asked: Prompt, count: int, **wanted: Any) -> Any:
    """Returns what transformers' `generate` gives for a prompt with its pictures."""
    model = _CLASSES[kind][0].from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.tensor([asked.tokens])
    inputs: dict[str, torch.Tensor] = {}
    if asked.pictures:
        mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
        inputs["pixel_values"] = torch.cat([one.pixel_values(mean, std) for one in asked.pictures])
        grids = [[1, 2 * one.rows, 2 * one.columns] for one in asked.pictures]
        inputs["image_grid_thw"] = torch.tensor(grids)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == IMAGE).long(),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **inputs,
        **wanted,
    )


def reference_beams(
    folder: Path, kind: str, asked: Prompt, count: int, width: int
) -> list[list[int]]:
    """Returns the `width` answers of a beam search of transformers, best first."""
    wanted = {"num_beams": width, "num_return_sequences": width}
    found = _generated(folder, kind, asked, count, **wanted)
    answers: list[list[int]] = found[:, len(asked.tokens) :].tolist()
    return answers


def reference_greedy(folder: Path, kind: str, asked: Prompt, count: int) -> list[int]:
    """Returns the next `count` tokens by transformers, each the clear best."""
    output = _generated(
        folder, kind, asked, count, output_logits=True, return_dict_in_generate=True
    )
    best = torch.cat(output.logits).topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 1e-4, "another seed: two tokens are near a tie"
    found: list[int] = output.sequences[0, len(asked.tokens) :].tolist()
    return found

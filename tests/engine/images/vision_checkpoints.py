"""Tiny random checkpoints of models that see images, and what transformers computes with them."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from engine.images.image_input import ImagePixels, ImageSpan
from tests.engine.images.vision_families import END, FAMILIES, IMAGE, MAX_LEN, START, VOCAB

__all__ = ["END", "IMAGE", "MAX_LEN", "START", "VOCAB"]


def save_checkpoint(kind: str, folder: Path, *, renames: bool = True) -> Path:
    """Saves random weights, large enough that attention and positions matter. `renames`: tensors
    have the names that are published, not those of transformers."""
    family = FAMILIES[kind]
    torch.manual_seed(5)
    model = family.model(family.make_config())
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            is_vector = parameter.dim() == 1
            parameter.copy_(1.0 + 0.2 * noise if is_vector else 0.15 * noise)
    model.save_pretrained(folder)
    if family.renamed and renames:
        tensors = load_file(folder / "model.safetensors")
        for expression, name in family.renamed:
            tensors = {re.sub(expression, name, own): it for own, it in tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name, content in family.files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@dataclass(frozen=True)
class Picture:
    """An image after preprocessing: [patches, 3, size, size] uint8, and its grid of tokens. `ends`:
    tokens behind each of its rows, and behind the last."""

    rows: int
    columns: int
    patches: np.ndarray
    ends: tuple[int, ...] = ()

    @property
    def pixels(self) -> ImagePixels:
        return ImagePixels(self.digest, self.rows, self.columns, self.patches.tobytes())

    @property
    def digest(self) -> bytes:
        return bytes([self.rows, self.columns, *self.patches.reshape(-1)[:30].tolist()])

    @property
    def tokens(self) -> list[int]:
        if not self.ends:
            return [IMAGE] * (self.rows * self.columns)
        return [*([*[IMAGE] * self.columns, self.ends[0]] * self.rows)[:-1], self.ends[1]]

    @property
    def frame(self) -> np.ndarray:
        """Returns [height, width, 3] uint8."""
        count, _, size, _ = self.patches.shape
        merge = round((count / (self.rows * self.columns)) ** 0.5)
        cut = self.patches.reshape(self.rows, self.columns, merge, merge, 3, size, size)
        height, width = (side * merge * size for side in (self.rows, self.columns))
        return cut.transpose(0, 2, 5, 1, 3, 6, 4).reshape(height, width, 3)


def picture(kind: str, rows: int, columns: int, seed: int) -> Picture:
    family = FAMILIES[kind]
    size, count = family.patch_size, rows * columns * family.merge_size**2
    numbers = np.random.default_rng(seed)
    patches = numbers.integers(0, 256, (count, 3, size, size), dtype=np.uint8)
    return Picture(rows, columns, patches, family.row_ends)


@dataclass(frozen=True)
class Prompt:
    """Tokens, images, and where these stand."""

    tokens: list[int]
    pictures: list[Picture]

    @property
    def spans(self) -> tuple[ImageSpan, ...]:
        starts = [i + 1 for i, token in enumerate(self.tokens) if token == START]
        return tuple(
            ImageSpan(start, one.rows, one.columns, one.digest, int(bool(one.ends)))
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
        tokens += [START, *one.tokens, END, *text()]
    return Prompt(tokens, pictures)


@torch.no_grad()
def _generated(folder: Path, kind: str, asked: Prompt, count: int, **wanted: Any) -> Any:
    """Returns what transformers' `generate` gives for a prompt with its pictures."""
    family = FAMILIES[kind]
    model = loaded(folder, kind)
    ids = torch.tensor([asked.tokens])
    inputs = family.model_inputs([one.frame for one in asked.pictures])
    if family.types:
        inputs[family.types] = (ids == IMAGE).long()
    if family.cache:
        wanted["cache_implementation"] = family.cache
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **inputs,
        **wanted,
    )


@cache
def loaded(folder: Path, kind: str) -> Any:
    return FAMILIES[kind].model.from_pretrained(folder, attn_implementation="eager").eval()


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

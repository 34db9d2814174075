"""Videos in prompts of tiny models: their tokens, their spans, and what transformers is given."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.images.image_input import ImagePixels, ImageSpan, image_digest
from tests.engine.images.vision_checkpoints import loaded
from tests.engine.images.vision_families import (
    END,
    FAMILIES,
    IMAGE,
    START,
    VIDEO,
    VisionFamily,
)

Pair = np.ndarray
"""[patches, 3, 2, size, size] uint8."""


@dataclass(frozen=True)
class Clip:
    """A video after preprocessing. `tick`: positions from one pair to the next, where no text is
    between them; 0: there is."""

    pairs: list[Pair]
    rows: int
    columns: int
    tick: float = 0.0


@dataclass(frozen=True)
class VideoPrompt:
    """Tokens, the spans of all pairs, and their pixels. `types`: 2 where a video's tokens are."""

    tokens: list[int]
    types: list[int]
    spans: tuple[ImageSpan, ...]
    pixels: tuple[ImagePixels, ...]
    clips: Sequence[Clip]


def clip(kind: str, count: int, rows: int, columns: int, seed: int, tick: float = 0.0) -> Clip:
    family = FAMILIES[kind]
    frames = 1 if kind.startswith("gemma") else 2
    side = family.patch_size
    shape = (rows * columns * family.merge_size**2, 3, frames, side, side)
    numbers = np.random.default_rng(seed)
    pairs = [numbers.integers(0, 256, shape, dtype=np.uint8) for _ in range(count)]
    return Clip(pairs, rows, columns, tick)


def video_prompt(kind: str, clips: Sequence[Clip], seed: int) -> VideoPrompt:
    """Returns text with the videos between its parts."""
    numbers, pad = random.Random(seed), IMAGE if kind.startswith("glm") else VIDEO
    tokens, types, spans = [numbers.randrange(1, 110) for _ in range(5)], [0] * 5, []
    pixels = {}

    def text(*said: int) -> None:
        tokens.extend(said)
        types.extend([0] * len(said))

    at_once = FAMILIES[kind].pairs_at_once
    for one in clips:
        size = one.rows * one.columns
        for index in range(len(one.pairs)):
            joins = bool(one.tick) and index > 0
            if not joins:
                text(START)
            place = index % at_once
            group = one.pairs[index - place :][:at_once]
            patches = b"".join(pair.tobytes() for pair in group)
            digest = image_digest(one.rows, one.columns, patches)
            pixels[digest] = ImagePixels(digest, one.rows, one.columns, patches)
            time, among = int(one.tick * index), (place * size, (len(group) - 1) * size)
            place_in_prompt = len(tokens), one.rows, one.columns
            spans.append(ImageSpan(*place_in_prompt, digest, 0, joins, time, *among))
            tokens += [pad] * size
            types += [2] * size
            if not one.tick:
                text(END, *[numbers.randrange(1, 110) for _ in range(2)])
        text(END, *[numbers.randrange(1, 110) for _ in range(4)])
    return VideoPrompt(tokens, types, tuple(spans), tuple(pixels.values()), clips)


@torch.no_grad()
def reference_greedy(folder: Path, kind: str, asked: VideoPrompt, count: int) -> list[int]:
    """Returns the next `count` tokens by transformers, each the clear best."""
    family, model = FAMILIES[kind], loaded(folder, kind)
    mean, std = (np.array(part, np.float32)[:, None, None, None] for part in family.shades)
    pairs = [pair for one in asked.clips for pair in one.pairs]
    patches = [
        ((pair.astype(np.float64) * (1 / 255)).astype(np.float32) - mean) / std for pair in pairs
    ]
    merge = family.merge_size
    at_once = family.pairs_at_once if family.pairs_at_once > 1 else 1 << 30
    if kind.startswith("gemma"):
        inputs = _of_gemma(family, asked)
        inputs["mm_token_type_ids"] = torch.tensor([asked.types])
        return _generated(model, asked, inputs, count, family.cache)
    if kind == "muse":
        sizes = [(one.rows, one.columns) for one in asked.clips for _ in one.pairs]
        patches = [_by_frame(pair, *size) for pair, size in zip(patches, sizes, strict=True)]
    grids = [
        [min(at_once, len(one.pairs) - first), one.rows * merge, one.columns * merge]
        for one in asked.clips
        for first in range(0, len(one.pairs), at_once)
    ]
    inputs = {
        "pixel_values_videos": torch.from_numpy(np.concatenate(patches)).flatten(1),
        "video_grid_thw": torch.tensor(grids),
    }
    if family.types:
        inputs[family.types] = torch.tensor([asked.types])
    if any(one.tick for one in asked.clips):
        ticks = model.config.vision_config.tokens_per_second
        inputs["second_per_grid_ts"] = torch.tensor([one.tick / ticks for one in asked.clips])
    return _generated(model, asked, inputs, count, family.cache)


def _by_frame(pair: Pair, rows: int, columns: int) -> Pair:
    """Returns patches row by row, of which each frame is whole: [patches, 2, 3, size, size]."""
    merge = round((len(pair) / (rows * columns)) ** 0.5)
    cut = pair.reshape(rows, columns, merge, merge, *pair.shape[1:])
    return cut.transpose(0, 2, 1, 3, 5, 4, 6, 7).reshape(len(pair), 2, 3, *pair.shape[3:])


def _of_gemma(family: VisionFamily, asked: VideoPrompt) -> dict[str, torch.Tensor]:
    """Returns frames as pictures, of all videos."""
    merge, side = family.merge_size, family.patch_size
    frames = []
    for one in asked.clips:
        rows, columns = one.rows, one.columns
        for pair in one.pairs:
            cut = pair.reshape(rows, columns, merge, merge, 3, side, side)
            size = rows * merge * side, columns * merge * side, 3
            frames.append(cut.transpose(0, 2, 5, 1, 3, 6, 4).reshape(size))
    found = family.model_inputs(frames)
    return {
        "pixel_values_videos": found["pixel_values"],
        "video_position_ids": found["image_position_ids"],
        "num_frames_per_video": torch.tensor([len(one.pairs) for one in asked.clips]),
    }


def _generated(
    model: Any, asked: VideoPrompt, inputs: dict[str, torch.Tensor], count: int, cache: str
) -> list[int]:
    ids = torch.tensor([asked.tokens])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        cache_implementation=cache or None,
        **inputs,
    )
    best = torch.cat(output.logits).topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 1e-4, "another seed: two tokens are near a tie"
    found: list[int] = output.sequences[0, len(asked.tokens) :].tolist()
    return found

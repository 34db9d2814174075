"""Explains what a vision tower launches for an image: the tower encodes one, of meta tensors.

1. the tower is built as an engine builds it, whole on each rank
2. one image of the size that is asked for passes through it, and its launches are recorded
3. blocks that launch the same are one row of the answer, between patches and mergers
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import nn

from engine.config import EngineConfig
from engine.explain.explanation import NOWHERE, Explanation, KernelChoice, alike
from engine.explain.launches import ATTENTION, LIBRARY, Launch, Launches
from engine.images.vision_spec import VisionSpec
from engine.models.factory import create_tower
from engine.models.vision.tower import VisionTower
from engine.parallel.place import ParallelPlace

_WHERE = "torch's, in a step of prompts before its pass; each rank that encodes has the whole tower"
_NO_GRAPH = "none: images differ in size"
_PLAIN = "a tower's weights are plain, and torch multiplies any number of rows"


def explain_tower(config: EngineConfig, num_tokens: int) -> Explanation:
    """Returns what encoding an image of at most this many tokens launches, with the sizes, on any
    device. No weights are read. The model must see images."""
    vision = config.model.vision
    assert vision is not None
    config = replace(config, images=replace(config.images, has_encoder=True))
    most = vision.pixels.max_tokens
    image = vision.blank_image(most if vision.pixels.fit == "square" else min(num_tokens, most))
    launches = Launches()
    with ExitStack() as stack:
        stack.enter_context(NOWHERE)
        stack.enter_context(launches.recording(has_flash=False))
        tower = create_tower(config, ParallelPlace(range(config.model.num_layers)), NOWHERE)
        assert tower is not None
        names = _number(tower, launches)
        tower.encode(image)
    tokens = image.rows * image.columns
    patches = tokens * tower.patches_of_token
    rows = {
        layer: tuple(
            _row(one, vision, patches) for one in found if one.name in (LIBRARY, ATTENTION)
        )
        for layer, found in launches.by_layer.items()
    }
    step = f"an image of {tokens} tokens, {patches} patches"
    return Explanation(step, _WHERE, _NO_GRAPH, alike(rows), names)


def _number(tower: VisionTower, launches: Launches) -> dict[int, str]:
    """Has launches counted by blocks, and by what is no block: the names of these, by number."""
    depth = tower.spec.depth
    names = {-1: "patches", depth: "merger"}
    for index, block in enumerate(tower.blocks):
        _count_as(block, launches, index)
    _count_as(tower.merger, launches, depth)
    for layer, tap in zip(tower.spec.tapped_layers, tower.taps, strict=True):
        names[depth + 1 + layer] = f"merger of layer {layer}"
        _count_as(tap, launches, depth + 1 + layer)
    launches.know(tower, ())
    return names


def _count_as(part: nn.Module, launches: Launches, number: int) -> None:
    def enter(*args: Any) -> None:
        launches.layer = number

    def leave(*args: Any) -> None:
        launches.layer = -1

    part.register_forward_pre_hook(enter)
    part.register_forward_hook(leave)
    for name, inner in part.named_modules():
        # Weights that are cut for parts with limits of their own are no parameters.
        inner.register_forward_pre_hook(lambda *_, name=name: setattr(launches, "part", name))


def _row(launch: Launch, vision: VisionSpec, patches: int) -> KernelChoice:
    if launch.name == LIBRARY:
        x, weight = launch.arguments[:2]
        size = x.shape[-1]
        sizes = f"{x.numel() // size} rows, {size} to {weight.numel() // size}"
        return KernelChoice(launch.part, LIBRARY, sizes, _PLAIN, LIBRARY, "")
    count, heads, length, width = launch.arguments[0].shape
    sizes = f"{count} x {length} patches, heads {heads} x {width}"
    why = f"windows of {vision.window_size} pixels a side, those of equal size at once"
    if (count, length) == (1, patches):
        why = "the patches of an image see each other"
    return KernelChoice("attn", "scaled_dot_product_attention", sizes, why, ATTENTION, "")

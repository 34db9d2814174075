"""Watches what attention layers write into an unquantised cache, and keeps the largest.

Latents, and the part of the keys that lies beside them, have one scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engine.layers.attention.latent.latent_block import LatentAttentionBlock
from engine.layers.attention.layer import Attention, AttentionInputs
from tandem_kernels.attention.kv_pages import KVPages, apart


class LargestKeysAndValues:
    """`largest[i]` [2, Hkv] float32: the largest key and value of each head, of the i-th attention
    layer of the model; [2, 1] of latents, both the same."""

    def __init__(self) -> None:
        self.largest: list[Tensor] = []
        self._index: dict[nn.Module, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches every step of every model in this process."""
        hook = nn.modules.module.register_module_forward_hook(self._after)
        try:
            yield
        finally:
            hook.remove()

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if isinstance(module, Attention):
            _, kv_cache, inputs, *_ = args
            self._take(module, apart(kv_cache), inputs)
        elif isinstance(module, LatentAttentionBlock):
            _, _, kv_cache, inputs = args
            self._take(module, apart(kv_cache.expand(-1, 2, -1, -1, -1)), inputs)

    def _take(self, layer: nn.Module, pages: KVPages, inputs: AttentionInputs) -> None:
        slots = inputs.slot_mapping[inputs.slot_mapping >= 0]
        if len(slots) == 0:
            return
        block_size = pages.k.shape[2]
        blocks = torch.div(slots, block_size, rounding_mode="floor")
        places = blocks, slots - blocks * block_size
        written = (plane.transpose(1, 2)[places] for plane in (pages.k, pages.v))
        largest = torch.stack([numbers.float().abs().amax(dim=(0, 2)) for numbers in written])
        index = self._index.setdefault(layer, len(self._index))
        if index == len(self.largest):
            self.largest.append(largest)
        else:
            torch.maximum(self.largest[index], largest, out=self.largest[index])

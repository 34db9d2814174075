"""transformers over an FP8 cache: the independent oracle.

The format is the list of its numbers; a number becomes the nearest, and of two the even one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from engine.kv_scales import KVScaleTable
from tests.engine.models.reference_models import reference


def scale_table(num_layers: int, num_kv_heads: int, least: float = 0.05) -> KVScaleTable:
    """Returns scales that differ by layer, by head, and between keys and values."""
    return KVScaleTable(
        k=tuple(
            tuple(_float32(least + 0.03 * layer + 0.02 * head) for head in range(num_kv_heads))
            for layer in range(num_layers)
        ),
        v=tuple((_float32(0.04 + 0.02 * layer),) for layer in range(num_layers)),
        source="of a test",
    )


def _float32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


@cache
def _numbers() -> Tensor:
    small = [m * 2.0**-9 for m in range(8)]
    others = [(8 + m) / 8 * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return torch.tensor([*small, *others[:-1]])


def stored(x: Tensor, scales: Tensor) -> Tensor:
    """Returns what comes back of `x` [R, Hkv, T, D] from a cache with `scales` [Hkv]."""
    numbers, scale = _numbers(), scales[:, None, None]
    wanted = (x.float() / scale).clamp(-448.0, 448.0)
    above = torch.searchsorted(numbers, wanted.abs().contiguous()).clamp(max=len(numbers) - 1)
    below = (above - 1).clamp(min=0)
    down, up = wanted.abs() - numbers[below], numbers[above] - wanted.abs()
    nearest = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return numbers[nearest].copysign(wanted).mul(scale).to(x.dtype)


class _QuantisedCache(DynamicCache):
    """Gives back what comes out of an FP8 cache, of the step's own keys and values, too."""

    def __init__(self, config: PreTrainedConfig, table: KVScaleTable) -> None:
        super().__init__(config=config)
        self._table = table
        self._is_latent = _is_latent(config)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        heads = 1 if self._is_latent else key_states.shape[1]
        scales = self._table.of_layer(layer_idx, heads)
        if self._is_latent:  # Latents, and the part of the keys that rotates.
            scales = scales[0], scales[0]
        keys, values = (
            stored(x, torch.tensor(own))
            for x, own in zip((key_states, value_states), scales, strict=True)
        )
        return super().update(keys, values, layer_idx, *args, **kwargs)


def _is_latent(config: PreTrainedConfig) -> bool:
    return getattr(config, "kv_lora_rank", None) is not None


class QuantisedReference:
    """A checkpoint in transformers, over an FP8 cache."""

    def __init__(self, folder: Path, table: KVScaleTable) -> None:
        self._model = reference(folder)
        self._config = self._model.config
        self._table = table

    def _cache(self) -> _QuantisedCache:
        return _QuantisedCache(self._config, self._table)

    @torch.no_grad()
    def logits(self, prompt: list[int]) -> Tensor:
        """Returns logits [len(prompt), VOCAB]."""
        return self._model(torch.tensor([prompt]), past_key_values=self._cache()).logits[0]

    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], float]:
        """Returns tokens, and the smallest lead that one had over the next best."""
        output = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            past_key_values=self._cache(),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(output.logits).topk(2).values
        lead = float((best[:, 0] - best[:, 1]).min())
        return output.sequences[0, len(prompt) :].tolist(), lead

    def chosen_behind(self, prompt: list[int], answer: list[int]) -> list[int]:
        """Returns the token chosen behind the prompt and each beginning of the answer: the answer,
        if it is the greedy one."""
        logits = self.logits([*prompt, *answer[:-1]])
        return logits[len(prompt) - 1 :].argmax(-1).tolist()

    def tokens(self, prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
        """Returns the greedy answer."""
        return self.greedy(prompt, count)[0]

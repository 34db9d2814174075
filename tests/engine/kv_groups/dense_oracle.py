"""The model of `grouped_model` without a cache: all tokens again for every token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.kv_groups.grouped_model import (
    EPS,
    HEAD_DIM,
    HIDDEN,
    KINDS,
    KV_HEADS,
    LATENT,
    NUM_HEADS,
    PLACE,
    ROPE_THETA,
)
from tests.engine.kv_groups.grouped_node import shown_by


class DenseOracle:
    """Computes without a cache; with `window` None all layers see all tokens."""

    def __init__(self, weights: dict[str, Tensor], window: int | None) -> None:
        self._weights = weights
        self._window = window
        self._known: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
        """Returns the most likely tokens."""
        found = self._known.setdefault(tuple(prompt), [])
        if len(found) < count and guess:
            chosen = self._chosen([*prompt, *guess[:-1]])[len(prompt) - 1 :]
            found[:] = shown_by(chosen, guess)
        while len(found) < count:
            found.append(self._chosen(prompt + found)[-1])
        return found[:count]

    def _chosen(self, tokens: list[int]) -> list[int]:
        """Returns the most likely token behind each."""
        weights = self._weights
        x = weights["embed.weight"][tokens]
        for layer, kind in enumerate(KINDS):
            normed = _rms_norm(x, weights[f"{layer}.norm.weight"])
            prefix = f"{layer}.attn"
            if kind == "latent":
                attended = self._latent(normed, prefix)
            else:
                window = self._window if kind == "window" else None
                attended = self._attention(normed, prefix, KV_HEADS[kind], window)
            x = x + F.linear(attended, weights[f"{prefix}.o_proj.weight"])
        logits = F.linear(_rms_norm(x, weights["norm.weight"]), weights["lm_head.weight"])
        return logits.argmax(-1).tolist()

    def _attention(self, x: Tensor, prefix: str, kv_heads: int, window: int | None) -> Tensor:
        def heads(name: str, count: int) -> Tensor:
            projected = F.linear(x, self._weights[f"{prefix}.{name}_proj.weight"])
            return projected.view(len(x), count, HEAD_DIM).transpose(0, 1)

        q, k, v = heads("q", NUM_HEADS), heads("k", kv_heads), heads("v", kv_heads)
        q, k = _rotate(q), _rotate(k)
        k, v = (part.repeat_interleave(NUM_HEADS // kv_heads, dim=0) for part in (k, v))
        scores = q @ k.transpose(1, 2) * HEAD_DIM**-0.5
        weights = scores.masked_fill(~_seen(len(x), window), float("-inf")).softmax(-1)
        return (weights @ v).transpose(0, 1).flatten(1)

    def _latent(self, x: Tensor, prefix: str) -> Tensor:
        keys = F.linear(x, self._weights[f"{prefix}.down.weight"])
        q = F.linear(x, self._weights[f"{prefix}.q.weight"])
        q = q.view(len(x), NUM_HEADS, LATENT + PLACE).transpose(0, 1)
        scores = q @ keys.T * (LATENT + PLACE) ** -0.5
        weights = scores.masked_fill(~_seen(len(x), None), float("-inf")).softmax(-1)
        return (weights @ keys[:, :LATENT]).transpose(0, 1).flatten(1)


def _seen(length: int, window: int | None) -> Tensor:
    """Returns what each token sees: [query, key]."""
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    return seen if window is None else seen.triu(1 - window)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (HIDDEN,), weight, EPS)


def _rotate(x: Tensor) -> Tensor:
    """Rotates [heads, L, D]."""
    half = HEAD_DIM // 2
    frequencies = ROPE_THETA ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat((pairs.real, pairs.imag), dim=-1)

"""An EAGLE-3 head as it is trained, in plain torch. Source: arXiv 2503.01840.

Position p reads token p and the model's feature of p - 1, and guesses token p + 1. When it drafts
further, its own output takes the place of the feature. So it is trained in several rounds: in the
first with the model's features, in each next one with its own outputs of the round before, which
see keys and values of true features.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from demo_model.lesson import Lesson

DRAFT_VOCAB = 640
"""The head may guess this many tokens: those that the model says most."""
TAPS = (1, 2, 3)
"""The head reads what goes into these layers."""
_NUM_ROUNDS = 3
_DECAY = 0.8
"""A later draft counts only if those before it were right."""


class Eagle3Trainee(nn.Module):
    """Holds the head. `texts`: what the model says, for the choice of the head's vocabulary.

    Attributes:
        sees_first: Positions attend to the key of position 0, which is zeros, as tandem's do. Heads
            of others are trained without it.
    """

    sees_first = True

    def __init__(self, model: PreTrainedModel, texts: Tensor) -> None:
        super().__init__()
        self._settings = model.config
        size, middle = self._settings.hidden_size, self._settings.intermediate_size
        self._heads, self._kv_heads = (
            self._settings.num_attention_heads,
            self._settings.num_key_value_heads,
        )
        self._head_dim = self._settings.head_dim
        self._eps = self._settings.rms_norm_eps
        embedding = model.get_input_embeddings().weight.detach()
        self.embedding = nn.Buffer(embedding.clone())
        counts = texts.flatten().bincount(minlength=len(embedding))
        self.kept = nn.Buffer(counts.argsort(descending=True)[:DRAFT_VOCAB].sort().values)
        self.fc = nn.Linear(len(TAPS) * size, size, bias=False)
        q, kv = self._heads * self._head_dim, self._kv_heads * self._head_dim
        self.q_proj = nn.Linear(2 * size, q, bias=False)
        self.k_proj = nn.Linear(2 * size, kv, bias=False)
        self.v_proj = nn.Linear(2 * size, kv, bias=False)
        self.o_proj = nn.Linear(q, size, bias=False)
        self.gate_proj = nn.Linear(size, middle, bias=False)
        self.up_proj = nn.Linear(size, middle, bias=False)
        self.down_proj = nn.Linear(middle, size, bias=False)
        self.input_norm, self.hidden_norm, self.mlp_norm, self.norm = (
            nn.Parameter(torch.ones(size)) for _ in range(4)
        )
        self.lm_head = nn.Parameter(embedding[self.kept].clone())

    def loss(self, seen: Lesson) -> Tensor:
        """Returns the cross entropy with the model's own distribution, over all rounds."""
        wanted = seen.probabilities[..., self.kept]
        total = wanted.new_zeros(())
        for number, logits in enumerate(self.guesses(seen)):
            missed = -(wanted * logits.log_softmax(-1)).sum(-1)
            total = total + _DECAY**number * missed[:, number + 1 :].mean()
        return total

    def guesses(self, seen: Lesson) -> Iterator[Tensor]:
        """Yields the logits [B, T, vocabulary of the head] of each round."""
        embedded = F.embedding(seen.tokens, self.embedding)
        feature = self.fc(torch.cat([seen.streams[layer] for layer in TAPS], dim=-1))
        keys, values = None, None
        for _ in range(_NUM_ROUNDS):
            before = F.pad(feature, (0, 0, 1, -1))
            feature, k, v = self._layer(embedded, before, keys, values)
            if keys is None:
                keys, values = k, v
            yield F.linear(self._normed(feature, self.norm), self.lm_head)

    def _layer(
        self, embedded: Tensor, before: Tensor, keys: Tensor | None, values: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the stream [B, T, H] and its keys and values [B, heads, T, D]. `keys` and
        `values`: of what comes before each position; None: its own."""
        normed = self._normed(before, self.hidden_norm)
        x = torch.cat([self._normed(embedded, self.input_norm), normed], dim=-1)
        x = F.pad(x[:, 1:], (0, 0, 1, 0))  # Nothing comes before the first.
        q, k, v = (
            self._split(x, projection) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotate(q), _rotate(k)
        scale = self._head_dim**-0.5
        scores = q @ (k if keys is None else keys).transpose(-1, -2) * scale
        length = x.shape[1]
        own = torch.eye(length, dtype=torch.bool)
        if keys is not None:
            scores = torch.where(own, (q * k).sum(-1, keepdim=True) * scale, scores)
        earlier = torch.ones(length, length, dtype=torch.bool).tril()
        earlier[1:, 0] &= self.sees_first
        weights = scores.masked_fill(~earlier, float("-inf")).softmax(-1)
        found = weights @ (v if values is None else values)
        if values is not None:
            found = found + weights.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * (v - values)
        stream = before + self.o_proj(found.transpose(1, 2).flatten(2))
        y = self._normed(stream, self.mlp_norm)
        return stream + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y)), k, v

    def _split(self, x: Tensor, projection: nn.Linear) -> Tensor:
        """Returns [B, query heads, T, D]; key and value heads are repeated."""
        parts = projection(x).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
        return parts.repeat_interleave(self._heads // parts.shape[1], dim=1)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._eps)

    def checkpoint(self) -> dict[str, Tensor]:
        """Returns the weights by the names of SafeAILab's checkpoints."""
        layer = {
            f"midlayer.{part}.{name}.weight": getattr(self, name).weight
            for part, names in (
                ("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")),
                ("mlp", ("gate_proj", "up_proj", "down_proj")),
            )
            for name in names
        }
        is_kept = torch.zeros(len(self.embedding), dtype=torch.bool)
        return layer | {
            "fc.weight": self.fc.weight,
            "midlayer.input_layernorm.weight": self.input_norm,
            "midlayer.hidden_norm.weight": self.hidden_norm,
            "midlayer.post_attention_layernorm.weight": self.mlp_norm,
            "norm.weight": self.norm,
            "lm_head.weight": self.lm_head,
            "d2t": self.kept - torch.arange(len(self.kept)),
            "t2d": is_kept.index_fill(0, self.kept, True),
        }

    def config(self) -> dict[str, Any]:
        """Returns what config.json says."""
        settings = self._settings
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": settings.hidden_size,
            "intermediate_size": settings.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self._heads,
            "num_key_value_heads": self._kv_heads,
            "head_dim": self._head_dim,
            "rms_norm_eps": self._eps,
            "rope_theta": _THETA,
            "max_position_embeddings": settings.max_position_embeddings,
            "vocab_size": settings.vocab_size,
            "draft_vocab_size": len(self.kept),
            "torch_dtype": "float32",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in TAPS]},
        }


_THETA = 10_000.0


def _rotate(x: Tensor) -> Tensor:
    """Turns the halves of [B, heads, T, D] by position."""
    size = x.shape[-1]
    angles = torch.outer(
        torch.arange(x.shape[-2]).float(), _THETA ** (-torch.arange(0, size, 2) / size)
    )
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

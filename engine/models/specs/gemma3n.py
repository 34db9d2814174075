"""Gemma 3n, text."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import NormalDist
from typing import Any, ClassVar

from engine.config import ModelConfig
from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import HeadNorm
from engine.models.specs.gemma import GemmaSpec, sharing_faults
from engine.models.specs.token_rows import AltSpec

_STREAMS, _RANK, _SHARING = 4, 64, 15
_INPUT, _INPUT_VOCAB = 256, 262_144
_SPARSE_LAYERS, _SPARSITY = 10, 0.95
"""transformers takes these where config.json says nothing."""


class Gemma3nSpec(GemmaSpec, frozen=True, kw_only=True):
    """Several residual streams, of which layers compute one, and a low-rank way around attention;
    norms of queries, keys and values; the last layers attend to keys and values of layers before
    them, and each layer reads an embedding of its own. Gates of the first layers are kept where
    they are far above their mean alone. Weights of norms are stored as they are."""

    norm_offset: ClassVar[float] = 0.0
    default_head_norm: ClassVar[HeadNorm] = "each"
    value_norm: ClassVar[bool] = True
    default_window: ClassVar[int] = 512
    full_layer_every: ClassVar[int] = 5
    default_theta: ClassVar[float] = 1_000_000.0
    local_theta: ClassVar[float | None] = 10_000.0
    default_final_softcap: ClassVar[float] = 30.0

    alternating: AltSpec
    cutoffs: tuple[float, ...]

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        count, shared = file.num_hidden_layers, _or(file.num_kv_shared_layers, _SHARING)
        return {
            **super().read_more(file, max_model_len),
            "attention_scale": 1.0,
            "first_sharing_layer": count - shared if shared else None,
            "layer_input_size": _or(file.hidden_size_per_layer_input, _INPUT),
            "layer_input_vocab": _or(file.vocab_size_per_layer_input, _INPUT_VOCAB),
            "alternating": AltSpec(
                count=_or(file.altup_num_inputs, _STREAMS), rank=_or(file.laurel_rank, _RANK)
            ),
            "cutoffs": tuple(
                NormalDist().inv_cdf(part) if part else 0.0 for part in _sparsity(file)
            ),
        }

    @property
    def alternating_streams(self) -> AltSpec:
        return self.alternating

    def gate_cutoff(self, layer: int) -> float:
        return self.cutoffs[layer]

    def hash_facts(self, model: ModelConfig) -> tuple[Any, ...]:
        own = ("alternating", self.alternating), ("cutoffs", self.cutoffs)
        return (*super().hash_facts(model), *own)

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        count, shared = file.num_hidden_layers, _or(file.num_kv_shared_layers, _SHARING)
        kinds = file.layer_types or [
            "sliding" if (i + 1) % cls.full_layer_every else "full" for i in range(count)
        ]
        yield from sharing_faults(kinds, count, shared)
        parts = _sparsity(file)
        if len(parts) != count or not all(part == 0.0 or 0.5 <= part < 1.0 for part in parts):
            yield UnsupportedField(
                "activation_sparsity_pattern",
                "other than a part from 0.5 to 1, or 0, of each layer",
            )
        for name, size in (
            ("altup_num_inputs", _or(file.altup_num_inputs, _STREAMS) - 1),
            ("laurel_rank", _or(file.laurel_rank, _RANK)),
            ("hidden_size_per_layer_input", _or(file.hidden_size_per_layer_input, _INPUT)),
        ):
            if size < 1:
                yield UnsupportedField(name, "a size below what it takes")
        if file.altup_active_idx:
            yield UnsupportedField("altup_active_idx", "layers that compute another stream than 0")
        if not file.altup_correct_scale:
            yield UnsupportedField("altup_correct_scale", "a first stream that is not scaled")


def _or(said: int | None, usual: int) -> int:
    return usual if said is None else said


def _sparsity(file: ConfigFile) -> list[float]:
    """Returns which part of the gates of each layer is not kept."""
    count, said = file.num_hidden_layers, file.activation_sparsity_pattern
    if said is None:
        sparse = _SPARSE_LAYERS if count > _SPARSE_LAYERS else 0
        return [_SPARSITY] * sparse + [0.0] * (count - sparse)
    return said if isinstance(said, list) else [said] * count

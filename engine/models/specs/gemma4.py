"""Gemma 4, text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from engine.head_sizes import HeadSizes
from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.dense import HeadNorm
from engine.models.specs.experts import ExpertNames, ExpertSpec, num_experts_of, number_of
from engine.models.specs.gemma import GemmaSpec, sharing_faults
from engine.models.specs.gemma4_fields import FULL_HEAD_DIM, WINDOW, with_common_names

_LAYER_INPUT, _LAYER_INPUT_VOCAB = 256, 262_144
"""transformers takes these where config.json says nothing."""
_NAMES = ExpertNames(
    router="router.proj.weight",
    router_norm="router.scale",
    expert_scales="router.per_expert_scale",
    input_norm="pre_feedforward_layernorm_2",
    dense_norm="post_feedforward_layernorm_1",
    sparse_norm="post_feedforward_layernorm_2",
)


class Gemma4Spec(GemmaSpec, frozen=True, kw_only=True):
    """Heads that are wider, and KV heads that are fewer, in layers that see everything, where
    values may be projected by the weights of keys; norms of queries, keys and values; each layer
    scales the stream. Weights of norms are stored as they are. Some have experts beside each dense
    block (26B-A4B); in others the last layers attend to keys and values of layers before them, and
    each layer reads an embedding of its own (E2B, E4B)."""

    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"^(model\.layers\.\d+)\.(router|experts)\.", r"\1.mlp.\2."),
    )

    norm_offset: ClassVar[float] = 0.0
    default_head_norm: ClassVar[HeadNorm] = "each"
    value_norm: ClassVar[bool] = True
    scales_layers: ClassVar[bool] = True
    default_window: ClassVar[int] = 512
    full_layer_every: ClassVar[int] = 6
    default_rotary_part: ClassVar[float | None] = 1.0
    local_theta: ClassVar[float | None] = 10_000.0

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        return with_common_names(file, cls.full_layer_every)

    @classmethod
    def head_dim_of(cls, file: ConfigFile) -> int:
        return file.global_head_dim or FULL_HEAD_DIM

    @classmethod
    def window_head_dim_of(cls, file: ConfigFile) -> int:
        return file.head_dim or cls.default_head_dim or 0

    @classmethod
    def read_heads(cls, file: ConfigFile) -> tuple[HeadSizes, ...]:
        count, kv_heads = file.num_attention_heads, file.num_kv_heads
        full = HeadSizes.alike(
            count, file.num_global_key_value_heads or kv_heads, cls.head_dim_of(file)
        )
        local = HeadSizes.alike(count, kv_heads, cls.window_head_dim_of(file))
        return tuple(local if kind == WINDOW else full for kind in file.layer_types or ())

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        if file.use_bidirectional_attention == "vision":
            # So tokens of images see each other, and no image is read.
            file = msgspec.structs.replace(file, use_bidirectional_attention=None)
        more = super().read_more(file, max_model_len)
        local = set(more["window_layers"])
        full = tuple(i for i in range(file.num_hidden_layers) if i not in local)
        size, vocab = file.hidden_size_per_layer_input, file.vocab_size_per_layer_input
        count, shared = file.num_hidden_layers, file.num_kv_shared_layers or 0
        return {
            **more,
            "attention_scale": 1.0,
            "shared_projections": full if file.attention_k_eq_v else (),
            "first_sharing_layer": count - shared if shared else None,
            "wide_layers": tuple(range(count - shared, count)) if file.use_double_wide_mlp else (),
            "layer_input_size": _LAYER_INPUT if size is None else size,
            "layer_input_vocab": _LAYER_INPUT_VOCAB if vocab is None else vocab,
            "experts": cls.read_experts(file) if file.enable_moe_block else None,
        }

    @classmethod
    def read_experts(cls, file: ConfigFile) -> ExpertSpec:
        """Returns the experts of all layers. Raises `UnsupportedField`."""
        return ExpertSpec(
            count=num_experts_of(file),
            top_k=number_of(file, "num_experts_per_tok"),
            intermediate_size=number_of(file, "moe_intermediate_size"),
            renormalise=True,
            gelu=True,
            names=_NAMES,
        )

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        kinds, shared = file.layer_types or [], file.num_kv_shared_layers or 0
        yield from sharing_faults(kinds, file.num_hidden_layers, shared)
        if shared and file.attention_k_eq_v:
            yield UnsupportedField("attention_k_eq_v", "values of keys beside layers that share")
        if (file.hidden_size_per_layer_input or 0) < 0:
            yield UnsupportedField("hidden_size_per_layer_input", "a size below 0")

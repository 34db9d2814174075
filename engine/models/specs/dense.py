"""Decoders whose layers are all alike: grouped-query attention and a gated feed-forward block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

from engine.config import KVLayers, ModelConfig
from engine.models.config_file import ConfigFile
from engine.models.errors import CheckpointError
from engine.models.specs.base import ModelSpec, UnsupportedField
from engine.models.specs.rope import read_llama3_or_plain
from engine.rope import AnyRopeScaling
from kv_transfer.layout import attention_group


class DenseSpec(ModelSpec, frozen=True, kw_only=True):
    """The settings that dense architectures share; each states how it differs.

    Attributes:
        attention_bias: Queries, keys and values have a bias.
        head_norm: RMSNorm over each head of queries and keys, before RoPE.
        fused_projections: The checkpoint has queries, keys and values as one tensor, and so gate
            and up.
        default_head_dim: Where config.json has none; None: hidden_size / heads.
        sliding_window: A token sees itself and so many less one before it; None: all before it, or
            no sequence is longer than the window.
    """

    attention_bias: ClassVar[bool] = False
    head_norm: ClassVar[bool] = False
    fused_projections: ClassVar[bool] = False
    default_head_dim: ClassVar[int | None] = None

    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: AnyRopeScaling | None
    tie_word_embeddings: bool
    sliding_window: int | None = None

    @classmethod
    def from_config(cls, file: ConfigFile, max_model_len: int) -> Self:
        for fault in _faults(file):
            raise fault
        window = cls.read_window(file)
        return cls(
            hidden_size=file.hidden_size,
            intermediate_size=file.intermediate_size,
            rms_norm_eps=file.rms_norm_eps,
            rope_theta=file.base_frequency(),
            rope_scaling=cls.read_rope(file, max_model_len),
            tie_word_embeddings=file.tie_word_embeddings,
            sliding_window=None if window is None or window >= max_model_len else window,
        )

    @classmethod
    def head_dim_of(cls, file: ConfigFile) -> int:
        computed = file.hidden_size // file.num_attention_heads
        return file.head_dim or cls.default_head_dim or computed

    @classmethod
    def read_rope(cls, file: ConfigFile, max_model_len: int) -> AnyRopeScaling | None:
        """Returns the scaling of rotary frequencies. Raises `UnsupportedField`."""
        return read_llama3_or_plain(file)

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        """Returns the sliding window of all layers. Raises `UnsupportedField` for a window of some
        layers, or where the family has none."""
        if file.use_sliding_window or set(file.layer_types or ()) - {"full_attention"}:
            raise UnsupportedField("use_sliding_window", "attention over a sliding window")
        return None

    def kv_layers(self, model: ModelConfig) -> tuple[KVLayers, ...]:
        if self.sliding_window is None:
            return ()
        group = attention_group(
            layers=range(model.num_layers),
            heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=model.dtype,
            block_size=1,
        )
        return (KVLayers(layers=group.layers, planes=group.planes, window=self.sliding_window),)

    def check_parallel(self, model: ModelConfig, tp_size: int) -> None:
        for count, name in (
            (model.num_heads, "attention heads"),
            (self.intermediate_size, "feed-forward units"),
        ):
            if count % tp_size:
                raise CheckpointError(
                    model.path,
                    f"has {count} {name}, which {tp_size} tensor-parallel ranks cannot share "
                    "evenly",
                    "choose a tensor_parallel_size that divides them",
                )
        if model.num_kv_heads % tp_size and tp_size % model.num_kv_heads:
            raise CheckpointError(
                model.path,
                f"has {model.num_kv_heads} key/value heads, which {tp_size} tensor-parallel ranks "
                "can neither share nor repeat evenly",
                "choose a tensor_parallel_size that divides them or is a multiple of them",
            )

    def hash_facts(self, model: ModelConfig) -> tuple[Any, ...]:
        return (
            model.architecture,
            self.hidden_size,
            self.intermediate_size,
            model.num_layers,
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            model.vocab_size,
            self.rms_norm_eps,
            self.rope_theta,
            self.rope_scaling,
            *(() if self.sliding_window is None else (self.sliding_window,)),
        )


def _faults(file: ConfigFile) -> Iterator[UnsupportedField]:
    sizes = {
        "vocab_size": file.vocab_size,
        "hidden_size": file.hidden_size,
        "intermediate_size": file.intermediate_size,
        "num_hidden_layers": file.num_hidden_layers,
        "num_attention_heads": file.num_attention_heads,
        "max_position_embeddings": file.max_position_embeddings,
        "num_key_value_heads": file.num_kv_heads,
    }
    for name, size in sizes.items():
        if size < 1:
            yield UnsupportedField(name, "a size below 1")
    heads, kv_heads = file.num_attention_heads, file.num_kv_heads
    if heads % kv_heads:
        yield UnsupportedField(
            "num_key_value_heads", f"{heads} heads over {kv_heads} key/value heads"
        )
    if file.quantization_config is not None:
        yield UnsupportedField("quantization_config", "quantised weights")
    if file.hidden_act != "silu":
        yield UnsupportedField("hidden_act", repr(file.hidden_act))
    for name, is_set in (("attention_bias", file.attention_bias), ("mlp_bias", file.mlp_bias)):
        if is_set:
            yield UnsupportedField(name, "biases beyond those of its family")
    if (file.partial_rotary_factor or file.rope.partial_rotary_factor) != 1.0:
        yield UnsupportedField("partial_rotary_factor", "rotary embedding of a part of each head")

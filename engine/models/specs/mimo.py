"""MiMo-V2."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.head_sizes import HeadSizes
from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField, of_each_layer
from engine.models.specs.experts import sigmoid_experts
from engine.models.specs.windowed import WindowedSpec

_FULL, _WINDOW = "full_attention", "sliding_attention"
_VALUE_SCALE = 0.707
_FULL_EVERY = 6


class MiMoV2Spec(WindowedSpec, frozen=True, kw_only=True):
    """Values narrower than keys and a third of each head that rotates; layers with a window have
    more KV heads, and sinks. Experts as in GLM-4.5 without a shared one."""

    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"\.attention_sink_bias$", ".sinks"),
    )
    default_eps: ClassVar[float] = 1e-5
    default_head_dim: ClassVar[int | None] = 192
    default_rotary_part: ClassVar[float | None] = 0.334
    default_theta: ClassVar[float] = 5_000_000.0
    local_theta: ClassVar[float | None] = 10_000.0
    default_window: ClassVar[int] = 129
    full_layer_every: ClassVar[int] = _FULL_EVERY
    num_dense: ClassVar[int | None] = 1
    default_v_head_dim: ClassVar[int] = 128
    default_layout: ClassVar[str] = "split"
    other_weights: ClassVar[tuple[str, ...]] = ("model.mtp.",)

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        count, said = file.num_hidden_layers, of_each_layer(file, "hybrid_layer_pattern")
        kinds = file.layer_types or [
            _FULL if i == 0 or (i + 1) % _FULL_EVERY == 0 else _WINDOW for i in range(count)
        ]
        if said is not None:
            kinds = [_WINDOW if has_window else _FULL for has_window in said]
        changes: dict[str, Any] = {"layer_types": kinds}
        if isinstance(file.moe_layer_freq, list):
            of_each_layer(file, "moe_layer_freq")
            changes["mlp_layer_types"] = [
                "sparse" if has_experts else "dense" for has_experts in file.moe_layer_freq
            ]
            changes["moe_layer_freq"] = 1
        if file.sliding_window_size is not None:
            # The publisher counts the tokens before a token, and not itself.
            changes["sliding_window"] = file.sliding_window_size + 1
        if file.rms_norm_eps is None:
            changes["rms_norm_eps"] = file.layernorm_epsilon
        return msgspec.structs.replace(file, **changes)

    @classmethod
    def read_heads(cls, file: ConfigFile) -> tuple[HeadSizes, ...]:
        full = HeadSizes(
            num_heads=file.num_attention_heads,
            num_kv_heads=file.num_kv_heads,
            head_dim=cls.head_dim_of(file),
            v_head_dim=file.v_head_dim or cls.default_v_head_dim,
        )
        local = HeadSizes(
            num_heads=file.swa_num_attention_heads or full.num_heads,
            num_kv_heads=file.swa_num_key_value_heads or 2 * full.num_kv_heads,
            head_dim=cls.window_head_dim_of(file),
            v_head_dim=file.swa_v_head_dim or full.v_head_dim,
        )
        return tuple(local if kind == _WINDOW else full for kind in file.layer_types or ())

    @classmethod
    def window_head_dim_of(cls, file: ConfigFile) -> int:
        return file.swa_head_dim or cls.head_dim_of(file)

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        layout = file.attention_projection_layout or cls.default_layout
        if layout not in ("split", "fused_qkv"):
            raise UnsupportedField("attention_projection_layout", repr(layout))
        if layout == "fused_qkv" and any(
            heads.num_heads % file.num_kv_heads or heads.num_kv_heads % file.num_kv_heads
            for heads in cls.read_heads(file)
        ):
            raise UnsupportedField(
                "num_key_value_heads", f"projections cut for {file.num_kv_heads} ranks"
            )
        more = super().read_more(file, max_model_len)
        local = set(more["window_layers"])
        has_sinks = {
            True: file.add_swa_attention_sink_bias is not False,
            False: bool(file.add_full_attention_sink_bias),
        }
        scale = file.attention_value_scale
        return {
            **more,
            "projection_ranks": file.num_kv_heads if layout == "fused_qkv" else 0,
            "sink_layers": tuple(i for i in range(file.num_hidden_layers) if has_sinks[i in local]),
            "value_scale": _VALUE_SCALE if scale is msgspec.UNSET else scale or 1.0,
            "experts": sigmoid_experts(file, cls.num_dense or 0),
        }


class MiMoV25Spec(MiMoV2Spec, frozen=True, kw_only=True):
    """MiMo-V2-Flash with projections in one tensor, cut for as many ranks as layers that see
    everything have KV heads, beside encoders of images and sound."""

    default_layout: ClassVar[str] = "fused_qkv"
    other_weights: ClassVar[tuple[str, ...]] = (
        "model.mtp.", "visual.", "audio_encoder.", "speech_embeddings.",
    )  # fmt: skip

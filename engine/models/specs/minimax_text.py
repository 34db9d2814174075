"""MiniMax-Text-01 and MiniMax-M1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField, kind_faults
from engine.models.specs.lightning import LightningSpec, check_lightning
from engine.models.specs.mixtral import MixtralSpec
from engine.models.specs.rope import read_rotary
from engine.models.specs.states import MIXED_KINDS, state_layers
from engine.rope import Rotary

_NORM_EPS = 1e-6
"""The norm of what is read has it, whatever config.json says of other norms."""
_LAYER_EPS = 1e-5
_PLACES = {
    "layernorm_full_attention": "full_attn",
    "layernorm_linear_attention": "linear_attn",
    "layernorm_mlp": "mlp",
}
"""Maps what the authors call a block to what transformers calls it."""


class MiniMaxText01Spec(MixtralSpec, frozen=True, kw_only=True):
    """Mixtral, most of whose layers have lightning attention, and whose residual stream goes on
    with what norms make of it."""

    other_weights: ClassVar[tuple[str, ...]] = ("decays.",)
    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = (
        # transformers stores what follows from the number of heads and the layer.
        (r"^.*\.(slope_rate|query_decay|key_decay|diagonal_decay)$", r"decays.\g<0>"),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.self_attn\.output_gate\.", ".self_attn.g_proj."),
        (r"\.self_attn\.norm\.", ".self_attn.g_norm."),
    )

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        said = file.attn_type_list
        if said is None:
            return file
        names = ["full_attention" if kind else "linear_attention" for kind in said]
        return msgspec.structs.replace(file, layer_types=names)

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        if isinstance(file.sliding_window, int):
            raise UnsupportedField("sliding_window", "attention over a sliding window")
        return None

    @classmethod
    def read_rotary(cls, file: ConfigFile, max_model_len: int) -> Rotary:
        head_dim = cls.head_dim_of(file)
        part = (file.rotary_dim or head_dim) / head_dim
        theta = file.rope_theta or cls.default_theta
        return read_rotary(file, head_dim, max_model_len, partial=part, theta=theta)

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        lightning = LightningSpec(
            layers=state_layers(file),
            heads=file.num_attention_heads,
            head_dim=cls.head_dim_of(file),
            groups=1,
            eps=_NORM_EPS,
            by_head=True,
            layer_eps=_LAYER_EPS,
        )
        check_lightning(file, lightning)
        factor = _factors(file, "alpha").pop()
        return {
            **super().read_more(file, max_model_len),
            "lightning": lightning,
            "norm_factor": factor,
        }

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        yield from kind_faults(file.layer_types, MIXED_KINDS)
        if file.postnorm is False:
            yield UnsupportedField("postnorm", "residuals that go on without a norm")
        if _factors(file, "beta") != {1.0}:
            yield UnsupportedField("layernorm_mlp_beta", "blocks whose results are scaled")
        factors = _factors(file, "alpha")
        if len(factors) > 1 or min(factors) <= 0:
            yield UnsupportedField("layernorm_mlp_alpha", "residuals that blocks scale differently")
        if file.shared_intermediate_size:
            yield UnsupportedField("shared_intermediate_size", "an expert that all tokens go to")


def _factors(file: ConfigFile, name: str) -> set[float]:
    """Returns all factors of a name, `alpha` or `beta`; 1 where config.json does not say."""
    found = set()
    for published, other in _PLACES.items():
        said = getattr(file, f"{published}_{name}")
        said = getattr(file, f"{other}_{name}_factor") if said is None else said
        found.add(1.0 if said is None else float(said))
    return found

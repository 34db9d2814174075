"""Experts without a gate, of which routed ones may read latents (Nemotron 3)."""

from __future__ import annotations

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField
from engine.models.specs.experts import ExpertNames, ExpertSpec, num_experts_of, number_of

_LATENTS = {"to_latent": "fc1_latent_proj", "from_latent": "fc2_latent_proj"}
_NAMES = ExpertNames(gate="", shared="shared_experts", **_LATENTS)


def latent_experts(file: ConfigFile, dense: tuple[int, ...]) -> ExpertSpec:
    """Returns the experts of all layers but the `dense` ones. Raises `UnsupportedField`."""
    return ExpertSpec(
        count=num_experts_of(file),
        top_k=number_of(file, "num_experts_per_tok"),
        intermediate_size=number_of(file, "moe_intermediate_size"),
        renormalise=file.norm_topk_prob is not False,
        dense_layers=dense,
        shared_size=number_of(file, "moe_shared_expert_intermediate_size"),
        sigmoid=True,
        choice_bias=True,
        scaling=1.0 if file.routed_scaling_factor is None else file.routed_scaling_factor,
        num_groups=file.n_group or 1,
        top_groups=file.topk_group or 1,
        squared=True,
        latent_size=_latent_size(file),
        names=_NAMES,
    )


def _latent_size(file: ConfigFile) -> int:
    """Returns the numbers of a token that routed experts read; 0: as the model has. Raises
    `UnsupportedField`."""
    size = file.moe_latent_size or 0
    if size < 0:
        raise UnsupportedField("moe_latent_size", f"latents of {size} numbers")
    return size

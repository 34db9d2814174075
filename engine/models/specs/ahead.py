"""Says what checkpoints call layers that predict several tokens ahead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AheadNames:
    """The checkpoint's names of layers that predict several tokens ahead; `{}`: a layer's number.

    Attributes:
        layer, projection, norm: The layer, what makes its input, and the norm behind it.
        embedding_norm, feature_norm: Of both parts of that input.
        embedding_projection: Projects the embedding alone, where `projection` is that of the
            feature's streams; "": one projects both beside each other.
        counts_on: Layers are numbered behind those of the model; else from 0.
        field: Of config.json, which says how many there are.
        dspark: A tensor by which DSpark's drafter is known, which a checkpoint may have under the
            same names; "": none has.
        feeds_norm: Of what such a layer gives, the next one is given what `norm` makes of it; else
            what is in front of it.
    """

    layer: str = "model.layers.{}"
    embedding_norm: str = "model.layers.{}.enorm"
    feature_norm: str = "model.layers.{}.hnorm"
    projection: str = "model.layers.{}.eh_proj"
    embedding_projection: str = ""
    norm: str = "model.layers.{}.shared_head.norm"
    counts_on: bool = True
    field: str = "num_nextn_predict_layers"
    dspark: str = ""
    feeds_norm: bool = False


BAILING_AHEAD = AheadNames(norm="model.layers.{}.final_layernorm", feeds_norm=True)
"""Ling and Ring have it from 2.5 on."""
NEMOTRON_AHEAD = AheadNames(
    layer="mtp.layers.{}",
    embedding_norm="mtp.layers.{}.enorm",
    feature_norm="mtp.layers.{}.hnorm",
    projection="mtp.layers.{}.eh_proj",
    norm="mtp.layers.{}.final_layernorm",
    counts_on=False,
    feeds_norm=True,
)

"""Tells which weights a stage of a pipeline reads besides those of its layers."""

from __future__ import annotations

from engine.models.specs.dense import DenseSpec
from engine.parallel.place import ParallelPlace
from engine.parallel.stage_link import StageLink

STREAM_HEADS = "model.hc_head", "model.output_attn_res"
"""These begin the names of what makes one row of several streams, behind the last layer."""


def has_embedding(link: StageLink, *, is_tied: bool) -> bool:
    """Returns whether this stage reads the embedding: for tokens, or as a tied head."""
    return link.is_first or (link.is_last and is_tied)


def weights_of_others(place: ParallelPlace, num_layers: int, *, is_tied: bool) -> frozenset[str]:
    """Returns beginnings of names of tensors that only other stages read."""
    names = {f"model.layers.{index}." for index in set(range(num_layers)) - set(place.layers)}
    if not has_embedding(place.pp, is_tied=is_tied):
        names.add("model.embed_tokens.")
    if not place.pp.is_last:
        names |= {"model.norm.", "lm_head.", *STREAM_HEADS}
    return frozenset(names)


def unread_weights(spec: DenseSpec, num_layers: int) -> frozenset[str]:
    """Returns names, and beginnings of names, of tensors that no stage reads: a tied head, which
    may be stored beside the embedding, and layers behind the last."""
    names = set(spec.other_weights)
    names |= {f"model.layers.{num_layers + i}." for i in range(spec.num_extra_layers)}
    return frozenset(names | ({"lm_head.weight"} if spec.tie_word_embeddings else set()))

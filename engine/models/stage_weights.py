"""Which weights a stage of a pipeline reads besides those of its layers."""

from __future__ import annotations

from engine.parallel import ParallelPlace
from engine.stage_link import StageLink


def has_embedding(link: StageLink, *, is_tied: bool) -> bool:
    """Returns whether this stage reads the embedding: for tokens, or as a tied head."""
    return link.is_first or (link.is_last and is_tied)


def weights_of_others(place: ParallelPlace, num_layers: int, *, is_tied: bool) -> frozenset[str]:
    """Returns beginnings of names of tensors that only other stages read."""
    names = {f"model.layers.{index}." for index in set(range(num_layers)) - set(place.layers)}
    if not has_embedding(place.pp, is_tied=is_tied):
        names.add("model.embed_tokens.")
    if not place.pp.is_last:
        names |= {"model.norm.", "lm_head."}
    return frozenset(names)

"""Chooses the data-parallel group that computes a request: by load, and by what each has of its
prompt already.

    cost of a group   tokens that it computes before the request's first one: those that wait there,
                      and those of the prompt that it has not cached
                      + `TOKENS_PER_REQUEST` for each request that it has, as each takes a row, and
                      the step of all groups is as long as that of the fullest
    has room          a row and all blocks are free: without, nothing knows how long it waits

The cheapest of the groups with room is taken. A prefix is thus followed as long as the tokens that
it saves outweigh the longer queue, and no longer: then another group computes it once, has it too,
and the load of a prefix that all ask for spreads by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.sched.scheduler_view import GroupOffer

TOKENS_PER_REQUEST = 64
"""A request weighs as much as this many tokens of prompts. A row costs a step less than a token of
a prompt, but for as many steps as its answer has tokens."""


def choose_group(offers: Sequence[GroupOffer]) -> int:
    """Returns the index of the best offer. Of equals, the one with most free blocks, and of those
    the one that has got fewest requests: so the caches of all groups fill, though nothing waits."""

    def rank(index: int) -> tuple[bool, int, int, int]:
        offer = offers[index]
        return not offer.has_room, _cost(offer), -offer.num_free_blocks, offer.num_given

    return min(range(len(offers)), key=rank)


def _cost(offer: GroupOffer) -> int:
    """Returns the cost in tokens, short of the prompt's length, which is the same for all."""
    load = offer.num_waiting_tokens + TOKENS_PER_REQUEST * offer.num_requests
    return load - offer.num_cached_tokens

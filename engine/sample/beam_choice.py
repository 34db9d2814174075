"""Chooses, on the device, the next beams of searches whose beams keep their rows.

The rule is that of `engine.sched.choices.beam_search`, which gets the same candidates a step later
and must come to the same beams: sums of log probabilities in float64, of equal ones that behind the
better beam first, then that of the lower token. What ended an answer does not go on, whatever the
answer is worth, so that which beams live depends on candidates alone.

Beams lie in seats, and a beam is better the lower its rank:

    seat           0        1        2
    rank           1        0        2
    continued by   -     2 beams   1 beam      the first successor stays in its parent's seat,
    next rank      2        0        1         others take seats that nothing continues, in order
    parent seat    1        1        2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NextBeams:
    """Beams of G searches of width W: all are [G, W], by seat.

    Attributes:
        parents: The seat of the beam that it continues, int64.
        token_ids: Its next token, int64.
        scores: Its sum of log probabilities with that, float64.
        ranks: Among the beams of its search, int64.
    """

    parents: Tensor
    token_ids: Tensor
    scores: Tensor
    ranks: Tensor


def choose_beams(
    token_ids: Tensor, logprobs: Tensor, scores: Tensor, ranks: Tensor, stop_ids: Tensor
) -> NextBeams:
    """Returns the best continuations. None of the operations waits for the device.

    Args:
        token_ids: [G, W, K] int64, candidates of the beam in each seat.
        logprobs: [G, W, K] float32, theirs. At least W of a beam's candidates end no answer.
        scores: [G, W] float64, of the beams.
        ranks: [G, W] int64, of the beams: each of 0 to W - 1 once.
        stop_ids: [G, S] int64, tokens that end an answer of the search; -1 is none.
    """
    width, num_candidates = token_ids.shape[1:]
    by_rank = ranks.argsort(dim=1)
    found = by_rank.unsqueeze(2).expand_as(token_ids)
    tokens, by_token = token_ids.gather(1, found).sort(dim=2)
    sums = logprobs.gather(1, found).gather(2, by_token).double()
    sums += scores.gather(1, by_rank).unsqueeze(2)
    tokens, sums = tokens.flatten(1), sums.flatten(1)
    ends = (tokens.unsqueeze(2) == stop_ids.unsqueeze(1)).any(dim=2)
    sums, places = sums.masked_fill_(ends, -torch.inf).sort(dim=1, descending=True, stable=True)
    sums, places = sums[:, :width], places[:, :width]
    parents = by_rank.gather(1, places // num_candidates)
    seats = _seats(parents)
    by_seat = torch.empty_like(parents)
    return NextBeams(
        parents=by_seat.scatter(1, seats, parents),
        token_ids=by_seat.scatter(1, seats, tokens.gather(1, places)),
        scores=torch.empty_like(scores).scatter(1, seats, sums),
        ranks=seats.argsort(dim=1),
    )


def _seats(parents: Tensor) -> Tensor:
    """Does for G searches what `engine.sched.choices.beam_seats.seats_of` does for one; both are
    [G, W], by rank."""
    same = parents.unsqueeze(2) == parents.unsqueeze(1)
    is_later = same.tril(-1).any(dim=2)
    is_continued = torch.zeros_like(is_later).scatter_(1, parents, True)
    free_first = is_continued.byte().argsort(dim=1, stable=True)
    number = (is_later.long().cumsum(dim=1) - 1).clamp_(min=0)
    return torch.where(is_later, free_first.gather(1, number), parents)

"""Plans which rank has which experts, by how many tokens came to each.

    loads of experts ──▶ copies: each spare slot goes to the expert with most tokens a copy
                     ──▶ ranks: heaviest copy first, each to the least loaded rank with a free slot
                     ──▶ numbers: experts that stay on a rank stay in their slot

That is the greedy form of DeepSeek's expert-parallel load balancer (its "global" policy; EPLB,
github.com/deepseek-ai/EPLB). Pure and torch-free: ranks with the same numbers find the same plan,
so no message is needed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Placement = tuple[tuple[int, ...], ...]
"""Numbers of experts, by rank and slot."""

LEAST_GAIN = 1 / 32
"""A layer is left as it is unless the busiest rank gets less by this part."""


@dataclass(frozen=True, slots=True, order=True)
class ExpertMove:
    """One expert's weights go from one slot to another; `rank` and `slot` are where they go."""

    slot: int
    rank: int
    from_rank: int
    from_slot: int


def initial_placement(num_experts: int, num_redundant: int, num_ranks: int) -> Placement:
    """Returns where experts are when nothing is known: in order, and then the first ones again.

    Raises:
        ValueError: Ranks would have different numbers of slots, or more slots than experts.
    """
    total = num_experts + num_redundant
    num_slots, rest = divmod(total, num_ranks)
    if rest:
        raise ValueError(
            f"{num_experts} experts and {num_redundant} redundant ones are no equal number on "
            f"{num_ranks} ranks"
        )
    if not 1 <= num_slots <= num_experts:
        raise ValueError(
            f"{num_redundant} redundant experts are too many: {num_ranks} ranks have room for "
            f"{num_experts * (num_ranks - 1)} beside one copy of each expert"
        )
    return tuple(
        tuple(place % num_experts for place in range(rank * num_slots, (rank + 1) * num_slots))
        for rank in range(num_ranks)
    )


def copies_of(placement: Placement, num_experts: int) -> list[list[tuple[int, int]]]:
    """Returns (rank, slot) of all copies of each expert, ascending."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(num_experts)]
    for rank, held in enumerate(placement):
        for slot, expert in enumerate(held):
            found[expert].append((rank, slot))
    return found


def loads_of_experts(placement: Placement, of_slots: Sequence[Sequence[int]]) -> list[int]:
    """Returns the tokens that came to each expert, from those that came to each rank's slots."""
    loads = [0] * (1 + max(max(held) for held in placement))
    for held, counts in zip(placement, of_slots, strict=True):
        for expert, count in zip(held, counts, strict=True):
            loads[expert] += count
    return loads


def expected_loads(placement: Placement, loads: Sequence[float]) -> list[float]:
    """Returns the tokens of each rank, if copies share those of their expert equally."""
    numbers = Counter(expert for held in placement for expert in held)
    return [sum(loads[expert] / numbers[expert] for expert in held) for held in placement]


def plan_placement(loads: Sequence[float], current: Placement) -> Placement:
    """Returns where experts should be: in the same numbers of slots, and `current` itself unless
    that makes the busiest rank notably less so.

    Args:
        loads: Tokens of each expert.
    """
    bins = _packed(_weights_of_copies(loads, current), current)
    planned = _in_their_slots(current, _on_their_ranks(current, bins))
    most = max(expected_loads(planned, loads))
    if most >= (1 - LEAST_GAIN) * max(expected_loads(current, loads)):
        return current
    return planned


def moves_between(current: Placement, planned: Placement) -> list[ExpertMove]:
    """Returns what must be copied, in an order in which ranks take turns. Those who have copies of
    an expert take turns, too; a rank that has one itself takes its own."""
    copies = copies_of(current, 1 + max(max(held) for held in current))
    found = []
    for rank, held in enumerate(planned):
        for slot, expert in enumerate(held):
            if current[rank][slot] == expert:
                continue
            own = [place for place in copies[expert] if place[0] == rank]
            source = own[0] if own else copies[expert][(rank + expert) % len(copies[expert])]
            found.append(ExpertMove(slot, rank, *source))
    return sorted(found)


def rounds_of(moves: Sequence[ExpertMove], most_sent: int) -> list[list[ExpertMove]]:
    """Cuts moves into rounds in which no rank sends more than `most_sent` experts."""
    rounds: list[list[ExpertMove]] = []
    for one in moves:
        for of_round in rounds:
            if sum(other.from_rank == one.from_rank for other in of_round) < most_sent:
                of_round.append(one)
                break
        else:
            rounds.append([one])
    return rounds


def _weights_of_copies(loads: Sequence[float], current: Placement) -> list[tuple[float, int]]:
    """Returns (tokens, expert) of each copy, heaviest first; no more copies than ranks."""
    num_ranks, numbers = len(current), [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(num_ranks * len(current[0]) - len(loads)):
        _, expert = heapq.heappop(heap)
        numbers[expert] += 1
        if numbers[expert] < num_ranks:
            heapq.heappush(heap, (-loads[expert] / numbers[expert], expert))
    copies = [
        (load / number, expert)
        for expert, (load, number) in enumerate(zip(loads, numbers, strict=True))
        for _ in range(number)
    ]
    return sorted(copies, key=lambda copy: (-copy[0], copy[1]))


def _packed(copies: list[tuple[float, int]], current: Placement) -> list[list[int]]:
    """Returns the experts of each rank."""
    num_slots = len(current[0])
    bins: list[list[int]] = [[] for _ in current]
    filled = [0.0] * len(bins)
    for weight, expert in copies:
        free = [rank for rank, held in enumerate(bins) if len(held) < num_slots]
        chosen = min(free, key=lambda rank: (filled[rank], expert in bins[rank], rank))
        bins[chosen].append(expert)
        filled[chosen] += weight
    return bins


def _on_their_ranks(current: Placement, bins: list[list[int]]) -> list[list[int]]:
    """Gives each bin to a rank, the one that has most of it already where that is free."""
    held = [Counter(experts) for experts in current]
    wanted = [Counter(experts) for experts in bins]
    pairs = sorted(
        (-(held[rank] & wanted[index]).total(), rank, index)
        for rank in range(len(bins))
        for index in range(len(bins))
    )
    by_rank: dict[int, list[int]] = {}
    given: set[int] = set()
    for _, rank, index in pairs:
        if rank not in by_rank and index not in given:
            by_rank[rank] = bins[index]
            given.add(index)
    return [by_rank[rank] for rank in range(len(bins))]


def _in_their_slots(current: Placement, planned: list[list[int]]) -> Placement:
    """Orders each rank's experts so that those that stay do so in their slot."""
    found = []
    for before, experts in zip(current, planned, strict=True):
        coming = Counter(experts)
        slots: list[int | None] = []
        for expert in before:
            stays = coming[expert] > 0
            slots.append(expert if stays else None)
            coming[expert] -= stays
        rest = iter(sorted(coming.elements()))
        found.append(tuple(next(rest) if expert is None else expert for expert in slots))
    return tuple(found)

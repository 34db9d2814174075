"""Moves the experts of one layer between ranks, in place: parameters keep their addresses, so that
recorded graphs stay valid.

    1. each rank packs what others lack, a few experts at a time; one exchange a round
    2. what came waits in a buffer until the last round: until then slots are read
    3. slots are overwritten

All of it is in the order of the device's stream: behind the steps before, in front of the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.expert_placement import ExpertMove, Placement, moves_between, rounds_of
from engine.layers.expert_methods.base import ExpertLayer
from engine.layers.methods.registry import UnsupportedScheme
from engine.parallel.distributed import ParallelGroup

SEND_BYTES = 256 << 20
"""Experts are packed in this much memory, or in what one of them takes."""


class ExpertMover:
    """Moves experts of layers that are all alike.

    Args:
        layer: One of them.
        group: All ranks that share the experts.

    Raises:
        UnsupportedScheme: A tensor of the layer does not belong to one expert after the other.
    """

    def __init__(self, layer: ExpertLayer, group: ParallelGroup) -> None:
        self._group = group
        parts = _bytes_of_experts(layer)
        num_slots, self._widths = layer.sizes.count, [part.shape[1] for part in parts]
        width = sum(self._widths)
        self.most_sent = max(1, min(num_slots, SEND_BYTES // width))
        self._sent = parts[0].new_empty((self.most_sent, width))
        self._received = parts[0].new_empty((num_slots, width))

    @torch.inference_mode()
    def move(self, layer: ExpertLayer, current: Placement, planned: Placement) -> int:
        """Copies what this rank lacks of `planned`; all ranks call it alike. Returns how many
        experts all ranks have got together."""
        parts = _bytes_of_experts(layer)
        moves = moves_between(current, planned)
        slots: list[int] = []
        for of_round in rounds_of(moves, self.most_sent):
            slots += self._exchange(parts, of_round, len(slots))
        for place, slot in enumerate(slots):
            for part, packed in zip(parts, self._parts_of(self._received[place]), strict=True):
                part[slot].copy_(packed)
        return len(moves)

    def _exchange(self, parts: list[Tensor], moves: list[ExpertMove], first: int) -> list[int]:
        """Fills places `first` and on of the buffer. Returns the slots that they are for."""
        rank, ranks = self._group.rank, range(self._group.size)
        sent = sorted((t for t in moves if t.from_rank == rank), key=lambda t: (t.rank, t.slot))
        coming = sorted((t for t in moves if t.rank == rank), key=lambda t: (t.from_rank, t.slot))
        for place, one in enumerate(sent):
            for part, packed in zip(parts, self._parts_of(self._sent[place]), strict=True):
                packed.copy_(part[one.from_slot])
        self._group.exchange_rows(
            self._sent[: len(sent)],
            [sum(one.rank == other for one in sent) for other in ranks],
            self._received[first : first + len(coming)],
            [sum(one.from_rank == other for one in coming) for other in ranks],
        )
        return [one.slot for one in coming]

    def _parts_of(self, packed: Tensor) -> tuple[Tensor, ...]:
        return torch.split(packed, self._widths)


def _bytes_of_experts(layer: ExpertLayer) -> list[Tensor]:
    """Returns [slots, bytes] of each of the layer's tensors: the same memory."""
    count = layer.sizes.count
    for name, tensor in layer.named_parameters():
        if len(tensor) != count or not tensor.is_contiguous():
            raise UnsupportedScheme(
                f"{name} of the experts is not one expert after the other, so that these cannot "
                "move between ranks: start without --enable-eplb"
            )
    return [tensor.detach().view(count, -1).view(torch.uint8) for tensor in layer.parameters()]

"""Checks the whole numbers of a checkpoint that index something: a GPU reads beyond the end of what
they index, and says nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.errors import CheckpointError


def check_indices(name: str, numbers: Tensor, below: int) -> None:
    """Raises `CheckpointError` where `numbers` [any shape] int, of the tensor `name`, are not from
    0 to below `below`."""
    smallest, largest = (int(one) for one in torch.aminmax(numbers))
    if smallest < 0 or largest >= below:
        fault = f"has indices from {smallest} to {largest}, which must be from 0 to {below - 1}"
        raise CheckpointError(name, fault, "download the checkpoint again")

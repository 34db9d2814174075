"""Block tables as rows: which physical blocks hold a request's KV, by logical block.

1. `add_request` writes the blocks that the request comes with.
2. `append` adds those that later steps make necessary.
3. both are carried to the device with `carried`, once a step.
4. `remove_request` forgets the row; entries behind the count are never read.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.batch.buffer_utils import CarriedTensor, StagedWriteTensor


class BlockTables:
    """`block_table[row, logical block]` on the device; `num_blocks_np[row]` are valid."""

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        max_drafts: int = 0,
    ) -> None:
        """Builds empty tables; a row may compute `max_drafts` tokens behind its known ones."""
        self.block_size = block_size
        self.max_drafts = max_drafts
        max_num_blocks = -(-(max_model_len + max_drafts) // block_size)
        self._block_table = StagedWriteTensor((max_num_reqs, max_num_blocks), np.int32, device)
        self.num_blocks_np = np.zeros(max_num_reqs, np.int32)

    @property
    def tensor(self) -> torch.Tensor:
        return self._block_table.tensor

    def add_request(self, row: int, block_ids: list[int]) -> None:
        self.append(row, block_ids)

    def append(self, row: int, block_ids: list[int]) -> None:
        self._block_table.stage_write(row, int(self.num_blocks_np[row]), block_ids)
        self.num_blocks_np[row] += len(block_ids)

    @property
    def carried(self) -> list[CarriedTensor]:
        """Returns the arrays that are carried over before a step."""
        return [self._block_table]

    def num_slots(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Returns, for each of `rows`, how many tokens its blocks hold."""
        slots: npt.NDArray[np.int32] = self.num_blocks_np[rows] * self.block_size
        return slots

    def remove_request(self, row: int) -> None:
        self.num_blocks_np[row] = 0

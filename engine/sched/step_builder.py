"""The next step message, while it is being put together."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.sched.output import NewRequestData, SchedulerOutput
from kv_transfer.metadata import KVConnectorMetadata


@dataclass(slots=True)
class StepBuilder:
    """Rows that end between two steps, and rows that stop decoding, are collected here until a
    step goes out to tell the workers; an idle engine may keep them for long."""

    finished_rows: list[int] = field(default_factory=list)
    new_reqs: list[NewRequestData] = field(default_factory=list)
    new_block_ids: list[tuple[int, list[int]]] = field(default_factory=list)
    prefill_chunks: list[tuple[int, int]] = field(default_factory=list)
    decode_add: list[int] = field(default_factory=list)
    decode_remove: list[int] = field(default_factory=list)

    def finish_row(self, index: int) -> None:
        """Withdraws everything else that was said of the row: workers apply the end first, and
        the row may have a new owner by then."""
        self.finished_rows.append(index)
        if index in self.decode_remove:
            self.decode_remove.remove(index)
        if index in self.decode_add:
            self.decode_add.remove(index)
        if self.new_block_ids:
            self.new_block_ids = [item for item in self.new_block_ids if item[0] != index]

    def add_to_decode(self, index: int) -> None:
        if index in self.decode_remove:
            self.decode_remove.remove(index)
        else:
            self.decode_add.append(index)

    def remove_from_decode(self, index: int) -> None:
        self.decode_remove.append(index)

    def build(self, step_id: int, kv: KVConnectorMetadata | None) -> SchedulerOutput:
        return SchedulerOutput(
            step_id,
            self.finished_rows,
            self.new_reqs,
            self.new_block_ids,
            self.prefill_chunks,
            self.decode_add,
            self.decode_remove,
            kv,
        )

"""One PullKV call asks for this; a transfer process has it, or not."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.errors import KVTransferError
from kv_transfer.layout import KVLayout
from kv_transfer.stages import ALL_LAYERS, positions_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSpec:
    """One PullKV call asks for this.

    Attributes:
        rank, tp_size: The puller's. From them follows which heads it takes from whom.
        stream, num_streams: As in `kv_transfer.wire.chunk_grid`.
        first_token, num_tokens: Tokens [first_token, num_tokens) of the prompt.
        repeat: Only these chunks, once more; empty for all of the stream.
        transport: How it wants to have it, see `kv_transfer/transports/base.py`.
        layers: Those that it has itself, counted from the first that is here.
    """

    rank: int
    tp_size: int
    stream: int
    num_streams: int
    first_token: int
    num_tokens: int
    repeat: frozenset[int] = frozenset()
    transport: int = 0
    layers: range = ALL_LAYERS

    def check(self, layout: KVLayout, process: int, num_processes: int, num_tokens: int) -> None:
        """Raises KVTransferError when process `process` of `num_processes` of a rank does not have
        it of a prompt of `num_tokens`."""
        if not layout.can_be_split(self.tp_size):
            raise KVTransferError(f"{self.tp_size} ranks cannot share the heads of this model")
        if self.rank >= self.tp_size:
            raise KVTransferError(f"there is no rank {self.rank} of {self.tp_size}")
        if self.num_streams < 1 or self.num_streams % num_processes != 0:
            raise KVTransferError(
                f"num_streams ({self.num_streams}) must be a multiple of this rank's processes "
                f"({num_processes})"
            )
        if self.stream >= self.num_streams or self.stream % num_processes != process:
            raise KVTransferError(f"stream {self.stream} is not for process {process}")
        if self.num_tokens != num_tokens:
            raise KVTransferError(
                f"the prompt has {num_tokens} tokens here and {self.num_tokens} there"
            )
        if not any(positions_of(group.layers, self.layers) for group in layout.groups):
            raise KVTransferError(f"none of the layers {self.layers} is here")
        if self.first_token > num_tokens:
            raise KVTransferError(
                f"first_token {self.first_token} is beyond the prompt ({num_tokens} tokens)"
            )

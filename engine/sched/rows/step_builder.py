"""The next step, while it is being put together.

1. rows that end between two steps, and rows that stop decoding, are collected here until a
   step goes out to tell the workers; an idle engine may keep them for long
2. `enter`, `add_chunk`, `add_blocks`, `add_to_decode`: what the step computes
3. `build` returns the message and the record of what its result confirms, and begins the next
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain

import msgspec

from engine.contracts.request import Request
from engine.contracts.scheduler_output import (
    AdaptiveOutput,
    BeamSeat,
    EncodingOutput,
    LoRASlot,
    NewRequestData,
    PulledDrafts,
    SchedulerOutput,
)
from engine.images.image_input import EncoderWork
from engine.kv_cache.block_hash import pack_tokens
from engine.kv_cache.kept_states import BlockCopy
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.rows.in_flight import InFlightStep, PromptChunk
from engine.sched.rows.row import Row
from kv_transfer.base import ChunkLike
from kv_transfer.metadata import KVConnectorMetadata


class StepBuilder:
    """Everything that is known of one step before it goes out."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._num_groups = kv_cache.num_groups
        self._begin()

    def _begin(self) -> None:
        self._finished_rows: list[int] = []
        self._new_reqs: list[NewRequestData] = []
        self._new_block_ids: list[tuple[int, list[int]]] = []
        self._prefill_chunks: list[tuple[int, int]] = []
        self._decode_add: list[int] = []
        self._decode_remove: list[int] = []
        self._block_copies: list[BlockCopy] = []
        self._kept_states: dict[int, list[BlockCopy]] = {}  # [row index]
        self.images: EncoderWork | None = None
        """Tells what the step does with images."""
        self._chunks: list[tuple[Row, int]] = []
        self._num_prompt_tokens = 0
        self._num_last_tokens = 0
        self.exported_chunks: list[ChunkLike] = []
        """The chunks whose KV a peer waits for."""

    @property
    def has_chunks(self) -> bool:
        """Returns whether the step computes anything beside the rows that decode."""
        return bool(self._chunks)

    def has_begun(self, row: Row) -> bool:
        """Returns whether the step lets the row begin, or computes a part of its prompt."""
        return any(new.row == row.index for new in self._new_reqs) or any(
            one is row for one, _ in self._chunks
        )

    def enter(
        self, row: Row, lora: LoRASlot | None, beam: BeamSeat | None, *, drafts_by_layers: bool
    ) -> None:
        """Records that a request has entered a row, with its blocks so far. `drafts_by_layers`:
        workers draft with KV of their own."""
        request = row.request
        first_token = request.num_computed_tokens if request.is_beam else 0
        block_ids, *of_other_groups = self._kv_cache.get_block_ids(request.request_id)
        self._new_reqs.append(
            NewRequestData(
                row=row.index,
                epoch=row.epoch,
                prompt_len=request.num_prompt_tokens - request.num_resumed_tokens,
                prefill_token_ids=pack_tokens(request.all_token_ids[first_token:]),
                num_computed_tokens=request.num_computed_tokens,
                block_ids=block_ids,
                max_len=row.max_len,
                sampling=request.row_sampling,
                eos_token_ids=request.eos_token_ids,
                sibling_seeds=() if request.knows_first_token else request.spec.sibling_seeds,
                pulled=_pulled_drafts(request) if drafts_by_layers else None,
                images=request.spec.images,
                lora=lora,
                first_token=first_token,
                beam=beam,
            )
        )
        self.add_blocks(row.index, enumerate(of_other_groups, start=1))

    def finish_row(self, index: int) -> None:
        """Withdraws everything else that was said of the row: workers apply the end first, and
        the row may have a new owner by then."""
        self._finished_rows.append(index)
        self._kept_states.pop(index, None)
        if index in self._decode_remove:
            self._decode_remove.remove(index)
        if index in self._decode_add:
            self._decode_add.remove(index)
        if self._new_block_ids:
            first, end = index * self._num_groups, (index + 1) * self._num_groups
            self._new_block_ids = [
                item for item in self._new_block_ids if not first <= item[0] < end
            ]

    def add_blocks(self, index: int, grown: Iterable[tuple[int, list[int]]]) -> None:
        """Records that the row has got more blocks: pairs of a KV group and their ids."""
        for group, block_ids in grown:
            self._new_block_ids.append((index * self._num_groups + group, block_ids))

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """Records copies that are made before the step computes anything."""
        self._block_copies += copies

    def keep_states(self, row: Row, num_tokens: int) -> None:
        """Keeps the row's states, which are those behind its first `num_tokens` tokens before the
        step, where a prefix may end."""
        if copies := self._kv_cache.states.keep(row.request, row.blocks, num_tokens):
            self._kept_states[row.index] = copies
            row.check_len = min(row.check_len, row.blocks.check_len)

    def add_to_decode(self, index: int) -> None:
        if index in self._decode_remove:
            self._decode_remove.remove(index)
        else:
            self._decode_add.append(index)

    def add_last_token(self, row: Row) -> None:
        """Records that the row decodes from this step on, whose last known token no step has
        computed."""
        self.add_to_decode(row.index)
        self._num_last_tokens += row.num_reserved < row.request.num_prompt_tokens

    def remove_from_decode(self, index: int) -> None:
        self._decode_remove.append(index)

    @property
    def num_chunk_tokens(self) -> int:
        """Returns the tokens of prompts in the step so far."""
        return sum(count for _, count in self._prefill_chunks)

    def add_chunk(self, row: Row, first_token: int, num_tokens: int) -> None:
        """Records that the step computes this many of the row's known tokens. A first token that
        came from a peer is no prompt token.
        """
        request, end = row.request, first_token + num_tokens
        self._num_prompt_tokens += max(0, min(end, request.num_prompt_tokens) - first_token)
        self._prefill_chunks.append((row.index, num_tokens))
        self._chunks.append((row, end))
        if row.is_exported:
            ids = self._kv_cache.get_block_ids(row.request_id)
            self.exported_chunks.append(PromptChunk(request, first_token, num_tokens, ids))

    def build(
        self,
        step_id: int,
        kv: KVConnectorMetadata | None,
        num_decodes: int,
        num_decode_tokens: int,
        num_drafts: int | None = None,
    ) -> tuple[SchedulerOutput, InFlightStep]:
        """Returns the step as workers get it, and as the scheduler remembers it. This many rows
        decode in it, and compute this many tokens at most. `num_drafts`: see `AdaptiveOutput`."""
        output = SchedulerOutput(
            step_id,
            self._finished_rows,
            self._new_reqs,
            self._new_block_ids,
            self._prefill_chunks,
            self._decode_add,
            self._decode_remove,
            kv,
            [*self._block_copies, *chain.from_iterable(self._kept_states.values())],
        )
        if num_drafts is not None or self.images is not None:
            fields = msgspec.structs.asdict(output) | {"num_drafts": num_drafts}
            if self.images is None:
                output = AdaptiveOutput(**fields)
            else:
                output = EncodingOutput(**fields, images=self.images)
        record = InFlightStep(
            step_id,
            time.monotonic(),
            self._chunks,
            self._num_prompt_tokens,
            num_decodes,
            num_decodes + len(self._chunks),
            num_decode_tokens + self.num_chunk_tokens,
            len(self._new_reqs),
            num_last_tokens=self._num_last_tokens,
        )
        self._begin()
        return output, record


def _pulled_drafts(request: Request) -> PulledDrafts | None:
    """Returns what drafters must know of KV that a peer gave."""
    pulled = request.pulled
    if pulled is None:
        return None
    feature = request.draft_feature if pulled.has_drafts else b""
    is_whole = request.num_computed_tokens == request.num_prompt_tokens
    return PulledDrafts(pulled.first_token, pulled.has_drafts, feature if is_whole else b"")

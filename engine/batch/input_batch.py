"""One step's batch, gathered from rows.

    1. `order_batch` decides which requests are in the step and in which order (host, numpy).
    2. `InputBuffers.load` uploads row numbers and bounds, unless they are those of the last step.
    3. `InputBuffers.gather` fills the model's inputs from the rows, at fixed addresses: one
       operation on the device, which a CUDA graph may hold.
    4. The `InputBatch` describes the result until the step's tokens are read.

Order of requests, so that every group is a slice:

    0 ............... num_decodes ......... num_sampled ............ num_reqs
    |  decodes: as     | chunks that end     | chunks that leave       |
    |  many tokens     | a prefill (sample)  | a rest (do not sample)  |
    |  each (sample)   |                     |                         |

Within its group, the attention backend puts the chunks in order. A decode computes its row's last
token and `decode_query_len - 1` drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.batch.buffer_utils import upload
from engine.batch.places import Int32Array as Int32Array
from engine.batch.places import Places
from engine.batch.row_states import RowStates
from engine.contracts.steps.step_launches import GraphKey, StepParts
from engine.layers.attention.backend import AttentionBackend, PrefillChunk
from tandem_kernels import ops
from tandem_kernels.batch.batch_tables import GroupTables, RowTables, StepInputs
from tandem_kernels.batch.state_metadata import PendingTokens, StateMetadata

_NO_ROW = -1
_ALIGNED_INTS = 4


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """Says who computes how much. Arrays are indexed by position in the batch."""

    rows: Int32Array
    """batch position -> row."""
    query_lens: Int32Array
    seq_lens: Int32Array
    """Context with this step's tokens."""
    num_decodes: int
    num_sampled: int
    decode_query_len: int = 1
    has_pending: bool = False
    """Whether states of decodes have not taken in all tokens before: see `state_metadata`."""
    has_exact_lens: bool = True
    """Whether `seq_lens` are exact; upper bounds, if rows may have had drafts in earlier steps."""
    is_recorded: bool = False
    """Whether a graph is made of the step: it is replayed with requests of any other lengths."""
    hides_decodes: bool = False
    """Whether the step is recorded, and replayed with decodes that have contexts of any length."""

    @classmethod
    def of_graph(cls, key: GraphKey) -> BatchOrder:
        """Returns the order of the requests of none with which a graph is recorded. Of prompts, any
        may have nearly all tokens."""
        count, query_len = key.num_reqs, max(key.decode_query_len, 1)
        query_lens = np.full(count, query_len, np.int32)
        query_lens[-1] += key.num_tokens - int(query_lens.sum())
        return cls(
            rows=np.full(count, _NO_ROW, np.int32),
            query_lens=query_lens,
            seq_lens=query_lens,
            num_decodes=count if key.decodes else 0,
            num_sampled=count,
            decode_query_len=query_len,
            is_recorded=True,
            hides_decodes=key.any_context,
        )

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decodes * self.decode_query_len

    def parts(self, *, samples: bool = True) -> StepParts:
        """Returns what its launch depends on. `samples`: no request needs more than a draw for its
        token. A chunk that leaves a rest of its prompt gets logits in vain, and no token."""
        decodes = StepParts(self.num_decodes, query_len=self.decode_query_len, samples=samples)
        if (num_prompts := len(self.rows) - self.num_decodes) == 0:
            return decodes
        return decodes._replace(
            num_prompts=num_prompts,
            prompt_tokens=int(self.query_lens[self.num_decodes :].sum()),
            longest_decode=int(self.seq_lens[: self.num_decodes].max(initial=0)),
            samples=samples and self.num_sampled == len(self.rows),
        )


def order_batch(
    decode_rows: Int32Array,
    prefill_chunks: list[tuple[int, int]],
    states: RowStates,
    attention: AttentionBackend,
    decode_query_len: int = 1,
) -> BatchOrder:
    """Decodes first. Without drafts, a chunk of one token that ends its prefill runs as a decode.
    Where states take in a decode's tokens one step later, it does not, however few tokens the
    decodes of this step have: choices share the state behind a prompt's last token.

    Raises:
        RowError: A chunk is empty, goes beyond its prefill, or belongs to none.
    """
    as_decode: list[int] = []
    ending: list[PrefillChunk] = []
    leaving: list[PrefillChunk] = []
    for row, length in prefill_chunks:
        states.check_chunk(row, length)
        chunk = PrefillChunk(row, length, int(states.num_computed_np[row]))
        if length < states.num_uncomputed_prefill(row):
            leaving.append(chunk)
        elif length == decode_query_len == 1 and states.num_taken is None:
            as_decode.append(row)
        else:
            ending.append(chunk)
    num_decodes = len(decode_rows) + len(as_decode)
    in_order = attention.order(ending) + attention.order(leaving)
    chunks = np.array(in_order, np.int32).reshape(-1, 3)
    rows = np.concatenate([decode_rows, np.array(as_decode, np.int32), chunks[:, 0]])
    of_decodes = np.full(num_decodes, decode_query_len, np.int32)
    query_lens = np.concatenate([of_decodes, chunks[:, 1]])
    return BatchOrder(
        rows=rows,
        query_lens=query_lens,
        seq_lens=states.num_computed_np[rows] + query_lens,
        num_decodes=num_decodes,
        num_sampled=num_decodes + len(ending),
        decode_query_len=decode_query_len,
        has_pending=states.num_taken is not None and num_decodes > 0,
        has_exact_lens=not states.has_drafts,
    )


@dataclass(frozen=True, slots=True)
class InputBatch:
    """R requests with T tokens, the first `order.num_sampled` of which get a new token.

    Tensors are views of the input buffers: the next `prepare` overwrites them.
    """

    order: BatchOrder
    num_tokens: int
    idx_mapping: torch.Tensor
    """[R] int32, batch position -> row."""
    query_start_loc: torch.Tensor
    """[R + 1] int32."""
    input_ids: torch.Tensor
    """[T] int32."""
    positions: torch.Tensor
    """[T] int64."""
    slot_mapping: torch.Tensor
    """[T] int64."""
    seq_lens: torch.Tensor
    """[R] int32."""
    block_tables: torch.Tensor
    """[R, max_blocks] int32."""
    window: int | None = None
    """The window of the KV group whose slots and block tables these are; see
    `InputBuffers.by_group`."""

    @property
    def num_reqs(self) -> int:
        return len(self.order.rows)

    @property
    def logits_indices(self) -> torch.Tensor:
        """Returns the query token in front of each sampled place: all of decodes, the last of each
        prefill that ends; [L].
        """
        order = self.order
        if order.decode_query_len == 1:
            return self.query_start_loc[1 : order.num_sampled + 1] - 1
        of_decodes = torch.arange(order.num_decode_tokens, device=self.query_start_loc.device)
        ends = self.query_start_loc[order.num_decodes + 1 : order.num_sampled + 1] - 1
        return torch.cat([of_decodes.int(), ends])

    @property
    def sampled_rows(self) -> torch.Tensor:
        """Returns `logits_indices`; where nothing samples, one query token that nothing reads: no
        layer computes nothing."""
        return self.logits_indices if self.order.num_sampled else self.query_start_loc[:1]

    def ends(self) -> InputBatch:
        """Returns `sampled_rows` as a batch of decodes: what is in front of each is in the cache,
        once this step's keys are. Without drafts only."""
        order, count = self.order, max(self.order.num_sampled, 1)
        assert order.decode_query_len == 1, "decodes have one token each"
        return replace(
            self,
            order=BatchOrder(
                order.rows[:count],
                np.ones(count, np.int32),
                order.seq_lens[:count],
                num_decodes=count,
                num_sampled=count,
            ),
            num_tokens=count,
            query_start_loc=torch.arange(
                count + 1, dtype=torch.int32, device=self.query_start_loc.device
            ),
            seq_lens=self.seq_lens[:count],
            block_tables=self.block_tables[:count],
        )

    def state_metadata(self, num_taken: torch.Tensor | None = None, most: int = 1) -> StateMetadata:
        """Returns the batch as layers see it that keep a state of each request. `num_taken` and
        `most`: see `PendingTokens`; None: the engine does not draft."""
        pending = None
        if num_taken is not None:
            pending = PendingTokens(self.idx_mapping, num_taken, most)
        return StateMetadata(
            blocks=self.block_tables[:, 0],
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            num_decodes=self.order.num_decodes,
            decode_query_len=self.order.decode_query_len,
            pending=pending,
        )

    def update_rows(self, token_ids: torch.Tensor, rows: RowTables) -> None:
        """Brings rows up to date with what was chosen, [R, W] int64: see `ops.post_update`."""
        order = self.order
        ops.post_update(self.idx_mapping, self.query_start_loc, token_ids, rows, order.num_decodes)

    def places(self) -> Places:
        """Returns where the step chooses tokens."""
        order = self.order
        num_sampled, num_decodes, width = (
            order.num_sampled,
            order.num_decodes,
            order.decode_query_len,
        )
        rows, max_seq_lens = order.rows[:num_sampled], order.seq_lens[:num_sampled]
        idx_mapping, seq_lens = self.idx_mapping[:num_sampled], self.seq_lens[:num_sampled]
        if width > 1:
            repeats = np.ones(num_sampled, np.int32)
            repeats[:num_decodes] = width
            rows, max_seq_lens = np.repeat(rows, repeats), np.repeat(max_seq_lens, repeats)
            of_decodes = idx_mapping[:num_decodes, None].expand(-1, width).flatten()
            idx_mapping = torch.cat([of_decodes, idx_mapping[num_decodes:]])
            seq_lens = self.positions[self.logits_indices].int() + 1
        rest = idx_mapping, seq_lens, self.input_ids, order.has_exact_lens and width == 1
        return Places(num_decodes, width, rows, max_seq_lens, *rest)


class InputBuffers:
    """Inputs of the model at fixed addresses, for up to `max_num_reqs` requests.

    KV groups share them, but for slots and block tables.

    Args:
        max_num_blocks: By KV group.
        windows: By KV group.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_num_tokens: int,
        max_num_blocks: Sequence[int],
        device: torch.device,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.max_num_tokens = max_num_tokens
        # Row numbers, then bounds, so that one copy carries both; the bounds begin at an address
        # as aligned as the first.
        self._bounds_at = -(-max_num_reqs // _ALIGNED_INTS) * _ALIGNED_INTS
        self._order = zeros(self._bounds_at + max_num_reqs + 1)
        self._loaded: Int32Array = np.zeros(0, np.int32)
        """The numbers that `_order` begins with."""
        self._inputs = StepInputs(
            input_ids=zeros(max_num_tokens),
            positions=zeros(max_num_tokens, dtype=torch.int64),
            slot_mapping=zeros(max_num_tokens, dtype=torch.int64),
            seq_lens=zeros(max_num_reqs),
            block_tables=zeros(max_num_reqs, max_num_blocks[0]),
        )
        self._windows = windows
        self._groups: GroupTables | None = None
        self._by_group = [
            self._inputs,
            *(
                replace(
                    self._inputs,
                    slot_mapping=zeros(max_num_tokens, dtype=torch.int64),
                    block_tables=zeros(max_num_reqs, num_blocks),
                )
                for num_blocks in max_num_blocks[1:]
            ),
        ]

    def prepare(self, order: BatchOrder, tables: Sequence[RowTables]) -> InputBatch:
        """Loads and gathers a batch that is not empty. Raises `ValueError` like `load`."""
        self.load(order, len(order.rows))
        self.gather(len(order.rows), tables)
        return self.loaded(order)

    def load(self, order: BatchOrder, num_padded: int) -> None:
        """Loads the batch, whose inputs `gather(num_padded)` will fill; the requests behind it are
        padding.

        Raises:
            ValueError: More tokens than the buffers hold.
        """
        num_reqs = len(order.rows)
        bounds = np.zeros(num_padded + 1, np.int32)
        np.cumsum(order.query_lens, out=bounds[1 : num_reqs + 1])
        num_tokens = int(bounds[num_reqs])
        bounds[num_reqs + 1 :] = num_tokens
        if num_tokens > self.max_num_tokens:
            raise ValueError(
                f"a step of {num_tokens} tokens is larger than max_num_batched_tokens "
                f"({self.max_num_tokens})"
            )
        self._upload(order.rows, bounds)

    def loaded(self, order: BatchOrder) -> InputBatch:
        """Returns the batch that was loaded last, whose order is `order`."""
        return self._batch(order, len(order.rows), int(order.query_lens.sum()))

    def load_padding(self, key: GraphKey) -> InputBatch:
        """Loads padding requests only, with which a graph is recorded."""
        self._upload(np.zeros(0, np.int32), np.zeros(key.num_reqs + 1, np.int32))
        return self._batch(BatchOrder.of_graph(key), key.num_reqs, key.num_tokens)

    def gather(self, num_reqs: int, tables: Sequence[RowTables]) -> None:
        """Fills the inputs of what was loaded. `tables`: by KV group."""
        idx_mapping = self.idx_mapping(num_reqs)
        query_start_loc = self._query_start_loc(num_reqs)
        ops.prepare_inputs(idx_mapping, query_start_loc, self._of_groups(tables))

    def _of_groups(self, tables: Sequence[RowTables]) -> GroupTables:
        """Returns the tables with inputs. Not for the first time where a graph is recorded."""
        found = self._groups
        if found is None or any(a is not b for a, b in zip(found.rows, tables, strict=True)):
            self._groups = found = GroupTables.of(tables, self._by_group)
        return found

    def by_group(self, batch: InputBatch) -> list[InputBatch]:
        """Returns the batch as each KV group sees it, with its own slots and block tables."""
        return [
            batch,
            *(
                replace(
                    batch,
                    slot_mapping=inputs.slot_mapping[: len(batch.slot_mapping)],
                    block_tables=inputs.block_tables[: len(batch.block_tables)],
                    window=window,
                )
                for inputs, window in zip(self._by_group[1:], self._windows[1:], strict=True)
            ),
        ]

    def idx_mapping(self, num_reqs: int) -> torch.Tensor:
        """Returns [num_reqs] int32: the rows of the batch that was loaded last."""
        return self._order[:num_reqs]

    def _query_start_loc(self, num_reqs: int) -> torch.Tensor:
        return self._order[self._bounds_at : self._bounds_at + num_reqs + 1]

    def _upload(self, rows: Int32Array, bounds: Int32Array) -> None:
        order = np.full(self._bounds_at + len(bounds), _NO_ROW, np.int32)
        order[: len(rows)] = rows
        order[self._bounds_at :] = bounds
        if not np.array_equal(order, self._loaded[: len(order)]):
            upload(order, self._order[: len(order)])
            self._loaded = order

    def _batch(self, order: BatchOrder, num_reqs: int, num_tokens: int) -> InputBatch:
        inputs = self._inputs
        return InputBatch(
            order=order,
            num_tokens=num_tokens,
            idx_mapping=self.idx_mapping(num_reqs),
            query_start_loc=self._query_start_loc(num_reqs),
            input_ids=inputs.input_ids[:num_tokens],
            positions=inputs.positions[:num_tokens],
            slot_mapping=inputs.slot_mapping[:num_tokens],
            seq_lens=inputs.seq_lens[:num_reqs],
            block_tables=inputs.block_tables[:num_reqs],
            window=self._windows[0],
        )

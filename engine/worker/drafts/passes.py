"""The passes in which a drafter's network guesses: K of one token a row, one behind the other.

    feature ─▶ pass 1 ─▶ draw ─▶ draft 1 ─▶ pass 2 ─▶ draw ─▶ draft 2 ...
                 └── its output is the feature of the next pass ──┘

Each writes keys and values of its token, and its draft behind the row's tokens, where the next one
reads it. A chain of K networks begins with all of them and ends with the last: the n-th draft is
the n-th network's, and what each has made of a token is the feature of the one behind it.

    pass 1: networks 1 2 3 ─▶ draft 1,  pass 2: networks 2 3 ─▶ draft 2,  pass 3: network 3 ...

On a GPU all passes are one CUDA graph: hundreds of small launches would take the host
longer than drafting saves. What a graph reads is copied to fixed addresses before:

    rows · bounds of the batch · features · room of the rows' blocks   ─▶ replay ─▶ drafts

Batches that no graph holds launch the same kernels one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from engine.batch.block_table import BlockTables
from engine.batch.buffer_utils import to_device
from engine.batch.input_batch import BatchOrder, InputBatch, Int32Array
from engine.config import EngineConfig
from engine.contracts.steps.step_launches import GraphKey
from engine.layers.attention.backend import AttentionBackend
from engine.layers.attention.layer import ChosenTokens
from engine.models.base import ForwardInputs, GroupInputs
from engine.models.drafts.base import DraftNetwork
from engine.models.drafts.medusa import MedusaHeads
from engine.worker.graphs.cuda_graphs import CudaGraphManager
from tandem_kernels import ops
from tandem_kernels.attention.index_pages import LayerCache
from tandem_kernels.batch.batch_tables import GroupTables, RowTables, StepInputs

_NO_ROW = -1


class Draw(Protocol):
    """Draws a token [S] int64 for each row of logits [S, vocabulary]: see `Sampler.draw`."""

    def __call__(
        self, logits: torch.Tensor, idx_mapping: torch.Tensor, seq_lens: torch.Tensor
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class DraftGroup:
    """Holds what passes read of a KV group.

    Attributes:
        window: Tokens that one sees at most; None: all before it.
    """

    tables: BlockTables
    rows: RowTables
    window: int | None


class DraftPasses:
    """Runs a drafter over tokens that it has guessed itself.

    Args:
        groups: Those that the network has, the first of which is described by drafts.
        of_target: The rows' tables of the model itself.
    """

    def __init__(
        self,
        config: EngineConfig,
        network: DraftNetwork,
        draw: Draw,
        attention: AttentionBackend,
        groups: Sequence[DraftGroup],
        of_target: RowTables,
        device: torch.device,
    ) -> None:
        draft = config.draft
        assert draft is not None
        self._network = network
        self._draw = draw
        self._attention = attention
        self._groups, self._of_target = groups, of_target
        self._vocab_size = config.model.vocab_size
        self._kv_caches: list[LayerCache] = []
        self._graphs: CudaGraphManager | None = None
        self.most_rows: int | None = None
        """Rows of the data-parallel group that has most, in this step; None: there is one group."""
        most = config.scheduler.max_num_seqs
        self._inputs = [_one_token_inputs(most, one.rows, device) for one in groups]
        self._of_groups = [
            GroupTables.of((one.rows,), (inputs,))
            for one, inputs in zip(groups, self._inputs, strict=True)
        ]
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        # What graphs read and write.
        self._row_ids = torch.full((most,), _NO_ROW, dtype=torch.int32, device=device)
        self._bounds = torch.zeros_like(self._starts)
        self._features = torch.zeros(
            (most, draft.feature_size), dtype=getattr(torch, config.model.dtype), device=device
        )
        self._room = torch.zeros_like(self._row_ids)
        width = max(1, config.decode_query_len - 1)
        self._drafts = torch.zeros((most, width), dtype=torch.int64, device=device)

    def use_cache(self, kv_caches: list[LayerCache]) -> None:
        """Takes the caches of the network's layers."""
        self._kv_caches = kv_caches

    def recording(
        self, graphs: CudaGraphManager, record_step: Callable[[GraphKey], None]
    ) -> Callable[[GraphKey], None]:
        """Returns what `graphs` are to record: of steps what `record_step` runs, and these passes.
        They are replayed from now on."""
        self._graphs = graphs

        def record(key: GraphKey) -> None:
            if key.num_drafts:
                self._record(key)
            else:
                record_step(key)

        return record

    def drop_graphs(self) -> None:
        """Makes the next passes launch their kernels one by one."""
        self._graphs = None

    def run(
        self, order: BatchOrder, idx_mapping: torch.Tensor, feature: torch.Tensor, rows: RowTables
    ) -> torch.Tensor:
        """Returns [S, K] int64: drafts for the rows `idx_mapping` [S], from the features [S, F] of
        their last computed tokens. `order` is the step's, which begins with them; `rows.max_drafts`
        is K."""
        count = len(idx_mapping)
        room = self._room_of(order.rows[:count])
        key = self._graph_of(count if self.most_rows is None else self.most_rows, rows.max_drafts)
        if self._graphs is None or key is None:
            lens = order.seq_lens[:count]
            batch = _Batch(order.rows[:count], lens, idx_mapping, self._starts[: count + 1])
            return self._passes(batch, idx_mapping, feature, room, rows)
        size = key.num_reqs
        self._row_ids[:count].copy_(idx_mapping)
        self._row_ids[count:size].fill_(_NO_ROW)
        torch.clamp(self._starts[: size + 1], max=count, out=self._bounds[: size + 1])
        self._features[:count].copy_(feature)
        if room is not None:
            self._room[:count].copy_(room)
        self._graphs.replay(key)
        return self._drafts[:count, : rows.max_drafts]

    def take_part(self, num_rows: int, num_drafts: int) -> None:
        """Computes what the drafts of other groups, `num_rows` requests in the largest, ask of this
        rank's experts, where it drafts for none itself."""
        key = self._graph_of(num_rows, num_drafts)
        if self._graphs is None or key is None:
            for networks in self._networks_of_passes(num_drafts):
                for network in networks:
                    for block in network.expert_blocks:
                        block.take_part()
            return
        self._row_ids[: key.num_reqs].fill_(_NO_ROW)
        self._bounds[: key.num_reqs + 1].zero_()
        self._graphs.replay(key)

    def _graph_of(self, num_rows: int, num_drafts: int) -> GraphKey | None:
        if self._graphs is None:
            return None
        return self._graphs.launches.of_drafts(num_rows, num_drafts)

    def _networks_of_passes(self, num_drafts: int) -> list[Sequence[DraftNetwork]]:
        """Returns the networks that run in each pass. Those whose drafts nothing asks for have
        nothing to make; Medusa's heads need no pass."""
        chain = self._network.chain
        if isinstance(self._network, MedusaHeads):
            return []
        return [(chain[i:] or chain[-1:])[: num_drafts - i] for i in range(num_drafts)]

    def _record(self, key: GraphKey) -> None:
        """Runs what a graph holds. Until a batch is loaded, its rows are none's."""
        size, num_drafts = key.num_reqs, key.num_drafts
        no_rows = np.full(size, _NO_ROW, np.int32)
        idx_mapping = self._row_ids[:size]
        batch = _Batch(no_rows, np.zeros(size, np.int32), idx_mapping, self._bounds[: size + 1])
        drafts = self._passes(
            batch,
            idx_mapping.clamp(min=0),
            self._features[:size],
            self._room[:size] if self._groups else None,
            replace(self._of_target, max_drafts=num_drafts),
        )
        self._drafts[:size, :num_drafts].copy_(drafts)

    def _passes(
        self,
        batch: _Batch,
        drawn: torch.Tensor,
        feature: torch.Tensor,
        room: torch.Tensor | None,
        rows: RowTables,
    ) -> torch.Tensor:
        """Runs all passes. `drawn`: the row of each draw; padding repeats a real row, and nothing
        reads what is drawn for it."""
        network, chain = self._network, self._network.chain
        next_place = rows.total_len[drawn.long()]
        features = [part.contiguous() for part in feature.chunk(len(chain), dim=1)]
        drafts = feature.new_full((len(drawn), rows.max_drafts), -1, dtype=torch.int64)
        of_passes = self._networks_of_passes(rows.max_drafts)
        choice = ChosenTokens() if network.chooses_once else None
        for index in range(rows.max_drafts):
            if isinstance(network, MedusaHeads):
                if index >= network.num_heads:
                    break
                logits = network.head_logits(index, feature)
            else:
                assert room is not None
                running = of_passes[index]
                found = self._pass(batch, index, running, features, room, choice)
                if choice is not None and not choice.stays:
                    choice.keep()
                logits = running[0].compute_logits(found[0])
                features = found[:-1] or found
            drawn_now = self._draw(logits, drawn, next_place + index)
            drafts[:, index] = drawn_now
            behind = replace(rows, total_len=rows.total_len + index)
            ops.write_drafts(batch.idx_mapping, drawn_now.unsqueeze(1), self._vocab_size, behind)
        return drafts

    def _room_of(self, rows: Int32Array) -> torch.Tensor | None:
        """Returns [S] int32: how many tokens the blocks of each row hold. None: the network has no
        blocks."""
        if not self._groups:
            return None
        slots = [group.tables.num_slots(rows) for group in self._groups]
        return to_device(np.minimum.reduce(slots), self._starts.device)

    def _pass(
        self,
        batch: _Batch,
        ahead: int,
        networks: Sequence[DraftNetwork],
        features: Sequence[torch.Tensor],
        room: torch.Tensor,
        choice: ChosenTokens | None,
    ) -> list[torch.Tensor]:
        """Computes the token `ahead` places behind the newest of each row by `networks`, with the
        feature [S, F] that each has of the one before it. Returns what each makes of it."""
        count = len(batch.idx_mapping)
        ones = np.ones(count, np.int32)
        order = BatchOrder(
            rows=batch.rows,
            query_lens=ones,
            seq_lens=batch.seq_lens + ones + ahead,
            num_decodes=count,
            num_sampled=count,
        )
        groups: list[GroupInputs] = []
        of_groups = zip(self._groups, self._inputs, self._of_groups, strict=True)
        for group, inputs, own in of_groups:
            behind = replace(group.rows, num_computed=group.rows.num_computed + ahead)
            tables = replace(own, rows=(behind,))
            ops.prepare_inputs(batch.idx_mapping, batch.starts, tables)
            slots = inputs.slot_mapping[:count]
            slots.masked_fill_(inputs.positions[:count] >= room, -1)
            seq_lens = torch.minimum(inputs.seq_lens[:count], room)
            view = InputBatch(
                order=order,
                num_tokens=count,
                idx_mapping=batch.idx_mapping,
                query_start_loc=batch.starts,
                input_ids=inputs.input_ids[:count],
                positions=inputs.positions[:count],
                slot_mapping=slots,
                seq_lens=seq_lens,
                block_tables=inputs.block_tables[:count],
                window=group.window,
            )
            groups.append(GroupInputs(slots, self._attention.metadata(view)))
        first = self._inputs[0]
        step = ForwardInputs(
            first.input_ids[:count],
            first.positions[:count],
            tuple(groups),
            self._kv_caches,
            self._attention,
            _no_layer,
            choice=choice,
        )
        return [
            network(step, feature) for network, feature in zip(networks, features, strict=False)
        ]


class _Batch:
    """Holds the rows of passes: on the host with their lengths, and on the device with the bounds
    of their tokens, [S + 1] int32."""

    __slots__ = ("idx_mapping", "rows", "seq_lens", "starts")

    def __init__(
        self,
        rows: Int32Array,
        seq_lens: Int32Array,
        idx_mapping: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        self.rows, self.seq_lens = rows, seq_lens
        self.idx_mapping, self.starts = idx_mapping, starts


def _one_token_inputs(max_num_reqs: int, rows: RowTables, device: torch.device) -> StepInputs:
    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return StepInputs(
        input_ids=zeros(max_num_reqs),
        positions=zeros(max_num_reqs, dtype=torch.int64),
        slot_mapping=zeros(max_num_reqs, dtype=torch.int64),
        seq_lens=zeros(max_num_reqs),
        block_tables=zeros(max_num_reqs, rows.block_table.shape[1]),
    )


def _no_layer(layer: int) -> None:
    """Drafts are no KV that a peer waits for."""

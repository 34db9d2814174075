"""Drafts with a network of its own: what it does in a step, and what for.

    target's layers ─▶ hidden ─┬─▶ sample ─▶ accept ─▶ rows advance ─┐
                               │                                     ▼
                               └─▶ follow: KV of the same tokens    settle ─▶ propose: K passes of
                                   in the drafter's layers                    one token a row

`follow` has the shape of the step, and may lie in its CUDA graph. Where a draft was right, it
writes the same slot again that `propose` wrote, now from a true feature; where it was wrong, later
steps do. `propose` computes up to K tokens behind the newest one, whose blocks may not be there
yet: what has no slot writes nothing and is not attended to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.batch.block_table import BlockTables
from engine.batch.buffer_utils import to_device
from engine.batch.input_batch import InputBatch
from engine.config import EngineConfig
from engine.contracts.scheduler_output import NewRequestData
from engine.contracts.steps.step_launches import GraphKey
from engine.layers.attention.backend import AttentionBackend
from engine.models.base import ForwardInputs, GroupInputs
from engine.models.drafts.base import DraftNetwork
from engine.models.drafts.factory import config_of_draft
from engine.worker.drafts.features import DraftFeatures, ends_of
from engine.worker.drafts.passes import DraftGroup, DraftPasses, Draw
from engine.worker.graphs.cuda_graphs import CudaGraphManager
from tandem_kernels import ops
from tandem_kernels.attention.index_pages import LayerCache
from tandem_kernels.batch.batch_tables import RowTables


class NetworkDrafter:
    """`tables` and `rows`: by KV group of the engine. `draw`: with the requests' own noise, so that
    equal distributions give equal tokens."""

    def __init__(
        self,
        config: EngineConfig,
        network: DraftNetwork,
        draw: Draw,
        attention: AttentionBackend,
        tables: Sequence[BlockTables],
        rows: Sequence[RowTables],
        device: torch.device,
    ) -> None:
        draft = config.draft
        assert draft is not None
        self.network = network
        self.taps = draft.taps
        self.first_layer = config.model.num_layers
        self._attention = attention
        self._groups = config.kv_layout.groups
        self._group_indices = _groups_of_draft(config)
        """The engine's KV group of each of the drafter's."""
        self._home = self._group_indices[0] if self._group_indices else 0
        """The group whose blocks have features."""
        self._rows = rows
        self._tables = tables
        limits = config.scheduler
        self.features = DraftFeatures(
            draft.feature_size,
            limits.max_num_batched_tokens,
            getattr(torch, config.model.dtype),
            device,
            parts=len(network.chain),
        )
        self.passes = DraftPasses(
            config,
            network,
            draw,
            attention,
            [
                DraftGroup(tables[index], rows[index], self._groups[index].window)
                for index in self._group_indices
            ],
            rows[0],
            device,
        )
        self._kv_caches: list[LayerCache] = []
        self._latest: tuple[InputBatch, torch.Tensor] | None = None
        """The latest step, and where the tokens of its requests end that are right."""
        self._is_known: torch.Tensor | None = None
        """[R], whether the drafter has KV of all tokens of these requests; None: it always has."""
        speculative = config.speculative
        assert speculative is not None
        self._lookup = speculative.prompt_lookup_min, speculative.prompt_lookup_max
        self._lacks_any = False
        """Some request had KV of a node without this drafter."""

    def use_cache(self, kv_caches: list[LayerCache], num_blocks: int) -> None:
        """Takes the caches of all layers, the drafter's behind the others."""
        self._kv_caches = kv_caches[self.first_layer :]
        self.passes.use_cache(self._kv_caches)
        self.features.use_blocks(num_blocks)

    def follow(
        self,
        batch: InputBatch,
        groups: Sequence[GroupInputs],
        by_group: Sequence[InputBatch],
        hidden: torch.Tensor,
        taps: list[torch.Tensor],
        on_layer: Callable[[int], None],
    ) -> None:
        """Computes what the drafter keeps of a step's tokens. `hidden` [T, H] and `taps` are the
        model's."""
        feature = self.network.features(hidden, taps)
        if not self._group_indices:
            self.features.take(feature)
            return
        home, size = by_group[self._home], self._tables[self._home].block_size
        inputs = ForwardInputs(
            batch.input_ids,
            batch.positions,
            tuple(groups[index] for index in self._group_indices),
            self._kv_caches,
            self._attention,
            lambda layer: on_layer(self.first_layer + layer),
        )
        for part, network in enumerate(self.network.chain):
            self.features.take(feature, part)
            feature = network(inputs, self.features.shifted(home, size, part))

    def take_pulled(self, new: NewRequestData) -> None:
        """Takes note of a new request's KV that came from a peer. Its blocks are in the tables."""
        pulled = new.pulled
        if pulled is None or not self._group_indices:
            return
        if new.num_computed_tokens <= pulled.first_token:
            return
        size, computed = self._tables[self._home].block_size, new.num_computed_tokens
        # A window has no blocks in front of it.
        seen = self._groups[self._home].first_token_seen(computed)
        first, last = max(pulled.first_token, seen) // size, (computed - 1) // size
        blocks = self._rows[self._home].block_table[new.row, first : last + 1].long()
        self.features.forget(blocks, is_known=pulled.has_kv)
        self._lacks_any |= not pulled.has_kv
        row = self.features.blocks[:1]
        # A second model reads no features: its rows are empty.
        if len(pulled.feature) == row.numel() * row.element_size() > 0:
            given = to_device(np.frombuffer(pulled.feature, np.uint8).copy(), row.device)
            self.features.blocks.index_copy_(0, blocks[-1:], given.view(row.dtype).view_as(row))

    def last_features(self, count: int) -> torch.Tensor:
        """Returns [count, F]: the features that a node needs which goes on with the first `count`
        requests of the latest step."""
        assert self._latest is not None
        return self.features.last(*self._latest)[:count]

    def settle(self, by_group: Sequence[InputBatch]) -> None:
        """Takes note of a step whose rows have advanced."""
        batch = by_group[self._home]
        ends = ends_of(batch, self._rows[0].total_len[batch.idx_mapping.long()])
        self._latest = batch, ends
        if self._group_indices:
            is_known = self.features.keep(batch, ends, self._tables[self._home].block_size)
            self._is_known = is_known if self._lacks_any else None

    def propose(self, idx_mapping: torch.Tensor, rows: RowTables) -> torch.Tensor:
        """Returns [S, K] int64 on the same device, see `Drafter`."""
        assert self._latest is not None
        batch, ends = self._latest
        count = len(idx_mapping)
        feature = self.features.last(batch, ends)[:count]
        found: torch.Tensor | None = None
        if self._is_known is not None:
            found = ops.lookup_ngrams(idx_mapping, rows, *self._lookup)
        drafts = self.passes.run(batch.order, idx_mapping, feature, rows)
        if found is not None and self._is_known is not None:
            drafts = torch.where(self._is_known[:count].unsqueeze(1), drafts, found)
        return drafts


def with_drafts(
    network: NetworkDrafter | None,
    graphs: CudaGraphManager,
    record_step: Callable[[GraphKey], None],
) -> Callable[[GraphKey], None]:
    """Returns what `graphs` record: steps, and the passes of the drafter if there is one."""
    return record_step if network is None else network.passes.recording(graphs, record_step)


def _groups_of_draft(config: EngineConfig) -> list[int]:
    """Returns the engine's KV group of each group of the drafter's own layers."""
    first = config.model.num_layers
    if config.draft is None or config.draft.num_layers == 0:
        return []
    group_of = {layer: i for i, one in enumerate(config.kv_layout.groups) for layer in one.layers}
    own = config_of_draft(config).kv_layout.groups
    return [group_of[first + group.layers[0]] for group in own]

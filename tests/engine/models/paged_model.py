"""A model over a paged cache, without scheduler and worker: the least that gives logits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.batch.input_batch import BatchOrder
from engine.config import EngineConfig
from engine.layers.attention.backend import AttentionBackend
from engine.layers.attention.paged import PagedBackend
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from engine.models.base import CausalLM, ForwardInputs, GroupInputs
from engine.worker.memory.kv_cache import layer_views
from kv_transfer.layout import KVGroup, of_every_group, own_groups
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.index_pages import (
    CachesByGroup,
    IndexedKV,
    IndexedLatents,
    LayerCache,
    OpenRows,
)
from tandem_kernels.attention.kv_pages import KVPages
from tandem_kernels.attention.token_rows import NarrowRows
from tandem_kernels.batch.state_metadata import StateMetadata

BLOCK_SIZE = 16
_NUM_BLOCKS = 384


@dataclass
class PagedSequence:
    tokens: list[int]
    blocks: list[list[int]] = field(default_factory=list)
    """Block ids of each KV group."""
    num_computed: int = 0

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_computed


class PagedModel:
    """The cache is full of NaN at first, and blocks are given out in falling order, so what is
    read from a wrong place shows. Bytes of states are 255: NaN in every dtype."""

    def __init__(
        self, config: EngineConfig, model: CausalLM, device: torch.device | str = "cpu"
    ) -> None:
        self._model = model
        self._device = device
        self._free = list(range(_NUM_BLOCKS))
        layout = config.kv_layout
        self._groups, self._every = own_groups(layout.groups), layout.groups
        sizes = {group.block_size for group in layout.groups if not group.is_state}
        assert BLOCK_SIZE in sizes
        # Rows of several tokens are shared by the token: the leader goes on with none of them.
        whole = [g.block_size for g in layout.groups if not g.is_state and g.compress_ratio == 1]
        self._largest_block = max(whole)
        memory = torch.empty(_NUM_BLOCKS * layout.block_bytes, dtype=torch.uint8, device=device)
        self.kv_caches = layer_views(memory, layout)
        for layer in self.kv_caches:
            for plane in _planes(layer):
                plane.fill_(float("nan") if plane.is_floating_point() else 255)
        self.layers_seen: list[int] = []
        self.backend: AttentionBackend = PagedBackend()

    def use_gemms(self, policy: GemmPolicy) -> None:
        """Uses these GEMMs from now on, whatever the policy that the model was made with."""
        for layer in self._model.modules():
            if isinstance(layer, MergedColumnParallelLinear | RowParallelLinear):
                layer.method = layer.choose_method(policy)

    def prefill(self, prompts: list[list[int]], chunk: int) -> list[torch.Tensor]:
        """Logits [len(prompt), vocabulary] of each; at most `chunk` tokens of each a step."""
        return self._compute([PagedSequence(prompt) for prompt in prompts], chunk)

    def prefill_sharing(
        self, prompts: list[list[int]], chunk: int
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Returns what `prefill` does, and logits of the last prompt behind the full blocks that it
        shares with the one before."""
        first, second = prompts[-2:]
        common = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
        shared = common // self._largest_block * self._largest_block
        assert shared > 0
        sequences = [PagedSequence(prompt) for prompt in prompts]
        leader = sequences[-2]
        if any(group.is_state for group in self._groups):
            leader = PagedSequence(first[:shared])  # A state is right for its last token only.
            sequences.append(leader)
        logits = self._compute(sequences, chunk)[: len(prompts)]
        blocks = [
            of_group[: group.num_blocks_for(shared)]
            for of_group, group in zip(leader.blocks, self._groups, strict=True)
        ]
        follower = PagedSequence(second, blocks, shared)
        return logits, self._compute([follower], chunk)[0]

    def _compute(self, sequences: list[PagedSequence], chunk: int) -> list[torch.Tensor]:
        logits: list[list[torch.Tensor]] = [[] for _ in sequences]
        while any(sequence.num_left for sequence in sequences):
            work = [
                (index, min(chunk, sequence.num_left))
                for index, sequence in enumerate(sequences)
                if sequence.num_left
            ]
            work.sort(key=lambda item: item[1] != 1)
            counts = [count for _, count in work]
            step = self._step([sequences[index] for index, _ in work], counts)
            for (index, _), part in zip(work, step.split(counts), strict=True):
                logits[index].append(part)
        return [torch.cat(parts) for parts in logits]

    @torch.inference_mode()
    def _step(self, sequences: list[PagedSequence], counts: list[int]) -> torch.Tensor:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[list[int]] = [[] for _ in self._groups]
        for sequence, count in zip(sequences, counts, strict=True):
            stop = sequence.num_computed + count
            sequence.blocks = sequence.blocks or [[] for _ in self._groups]
            positions += range(sequence.num_computed, stop)
            ids += sequence.tokens[sequence.num_computed : stop]
            for group, blocks, of_group in zip(self._groups, sequence.blocks, slots, strict=True):
                size = group.block_size
                while len(blocks) * size < stop:
                    blocks.append(self._free.pop())
                of_group += [
                    blocks[position // size] * size + position % size
                    for position in range(sequence.num_computed, stop)
                ]
            sequence.num_computed = stop
        with torch.device(self._device):
            groups = tuple(
                GroupInputs(
                    torch.tensor(of_group),
                    self._metadata(_batch(sequences, counts, i, group), group),
                )
                for i, (of_group, group) in enumerate(zip(slots, self._groups, strict=True))
            )
            inputs = torch.tensor(ids), torch.tensor(positions)
        hidden = self._model(
            ForwardInputs(
                *inputs,
                of_every_group(self._every, groups),
                self.kv_caches,
                self.backend,
                self.layers_seen.append,
            )
        )
        logits: torch.Tensor = self._model.compute_logits(hidden)
        return logits

    def _metadata(self, batch: _Batch, group: KVGroup) -> AttentionMetadata | StateMetadata:
        if not group.is_state:
            return self.backend.metadata(batch)
        return StateMetadata(
            batch.block_tables[:, 0],
            batch.query_start_loc,
            batch.seq_lens,
            batch.order.num_decodes,
        )


def _planes(layer: LayerCache) -> list[torch.Tensor]:
    if isinstance(layer, CachesByGroup):
        return [plane for cache in layer.caches for plane in _planes(cache)]
    if isinstance(layer, OpenRows):
        return list(layer.planes)
    if isinstance(layer, IndexedLatents):
        index = layer.index
        return [
            *_planes(layer.latents),
            index.keys,
            *([] if index.scales is None else [index.scales]),
        ]
    if isinstance(layer, NarrowRows):
        return [layer.numbers, layer.rotated, layer.exponents]
    if isinstance(layer, IndexedKV):
        return [*_planes(layer.kv), layer.index]
    return [layer.k, layer.v] if isinstance(layer, KVPages) else [layer]


@dataclass(frozen=True)
class _Batch:
    """A step as backends see it."""

    order: BatchOrder
    block_tables: torch.Tensor
    window: int | None
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor


def _batch(sequences: list[PagedSequence], counts: list[int], index: int, group: KVGroup) -> _Batch:
    blocks = [sequence.blocks[index] for sequence in sequences]
    longest = max(map(len, blocks))
    tables = [of_one + [0] * (longest - len(of_one)) for of_one in blocks]
    lengths = [sequence.num_computed for sequence in sequences]
    num_rows = len(sequences)
    order = BatchOrder(
        rows=np.arange(num_rows, dtype=np.int32),
        query_lens=np.array(counts, np.int32),
        seq_lens=np.array(lengths, np.int32),
        num_decodes=counts.count(1),
        num_sampled=num_rows,
    )
    return _Batch(
        order,
        torch.tensor(tables, dtype=torch.int32),
        group.window,
        torch.tensor([0, *counts]).cumsum(0).int(),
        torch.tensor(lengths, dtype=torch.int32),
    )

"""The attention block of a decoder: projections around `Attention`.

Sources: Ainslie et al., grouped queries (arXiv 2305.13245); Gemma 2 (arXiv 2408.00118) for bounded
scores; the model card of gpt-oss (arXiv 2508.10925) for sinks; Qiu et al. (arXiv 2505.06708) for
gates of heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from engine.head_sizes import HeadSizes
from engine.layers.attention.backend import AttentionSpec
from engine.layers.attention.index.block_indexer import BlockIndexer, BlockIndexerSizes
from engine.layers.attention.layer import Attention, AttentionInputs
from engine.layers.linear import GateForm, QKVParallelLinear, RowParallelLinear, repeated
from engine.layers.methods.base import HeadPlaces
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.rows import RowForm, Rows, UnnormedRows
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.split_norm import SplitRMSNorm
from kv_transfer.planes import NO_HEADS, HeadRange, heads_of_rank
from tandem_kernels import ops
from tandem_kernels.attention.index_pages import IndexedKV
from tandem_kernels.attention.kv_pages import PagedKV
from tandem_kernels.attention.kv_scales import KVScales
from tandem_kernels.attention.value_form import PLAIN_VALUES, ValueForm

HeadNorm = Literal["none", "each", "all"]
GateActivation = Literal["sigmoid", "softplus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Says what an architecture's attention has besides its sizes.

    Attributes:
        bias, output_bias: Queries, keys and values have one; so has the output.
        sinks: Each query head has one; see `AttentionSpec`.
        head_norm: RMSNorm of queries and keys before RoPE: over each head, over all heads of all
            ranks together, or none.
        eps: Of those norms.
        norm_offset: See `RMSNorm`.
        has_norm_weights: Those norms have weights.
        scale: Of the scores; None: head_dim ** -0.5.
        softcap: Bound of the scores; 0: none.
        head_order: See `engine.rope.Rotary.head_order`.
        output_gate: What each head attends to is multiplied by a gate; says where the checkpoint
            has it.
        gate_activation: What is done to gates first.
        gate_name: Of the gates' projection, if they have one.
        gate_bias: Those of each head have a bias of one number.
        shares_keys: Values are projected by the weights of keys.
        has_kv: It has keys and values of its own, and not those of another layer.
        values: See `Attention`.
        indexer: Chooses the blocks that are attended to; None: all are.
        kv_scales: See `AttentionSpec`.
    """

    bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    head_norm: HeadNorm = "none"
    eps: float = 0.0
    norm_offset: float = 0.0
    has_norm_weights: bool = True
    scale: float | None = None
    softcap: float = 0.0
    head_order: tuple[int, ...] | None = None
    output_gate: GateForm = "none"
    gate_activation: GateActivation = "sigmoid"
    gate_name: str = "gate_proj"
    gate_bias: bool = False
    shares_keys: bool = False
    has_kv: bool = True
    values: ValueForm = PLAIN_VALUES
    kv_scales: KVScales | None = None
    indexer: BlockIndexerSizes | None = None


class AttentionBlock(nn.Module):
    """Adds grouped-query attention to the residual stream.

    Args:
        heads: Of all ranks.
        norm: Of what is added; None: none.
        input_size: Of what it reads; None: `hidden_size`.
    """

    q_norm: RMSNorm | SplitRMSNorm | None
    k_norm: RMSNorm | SplitRMSNorm | None
    sinks: nn.Parameter | None
    gate_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        heads: HeadSizes,
        shard: Shard,
        options: AttentionOptions,
        *,
        norm: RMSNorm | None = None,
        input_size: int | None = None,
    ) -> None:
        super().__init__()
        head_dim, num_heads, num_kv_heads = heads.head_dim, heads.num_heads, heads.num_kv_heads
        first_head, local_heads = shard.part(num_heads)
        tp, has_kv = shard.tp, options.has_kv
        kv_heads = heads_of_rank(num_kv_heads, tp.rank, tp.size) if has_kv else NO_HEADS
        self.eps, self.norm = options.eps, norm
        order = options.head_order
        head_order = None if order is None else torch.tensor(order)
        self.qkv_proj = QKVParallelLinear(
            input_size or hidden_size,
            heads,
            kv_heads,
            shard,
            bias=options.bias,
            head_order=head_order,
            gates=options.output_gate,
            gate_name=options.gate_name,
            shares_keys=options.shares_keys,
        )
        gates_of_head = {"none": 0, "per_head": 1}.get(options.output_gate, heads.v_head_dim)
        self.num_gates = local_heads * gates_of_head
        self.has_softplus = options.gate_activation == "softplus"
        self.gate_bias = shard.parameter(local_heads) if options.gate_bias else None
        normed = (HeadRange(first_head, local_heads), num_heads), (kv_heads, num_kv_heads)
        self.q_norm, self.k_norm = (
            _head_norm(part, total, head_dim, options, head_order, shard) for part, total in normed
        )
        self.indexer = _block_indexer(hidden_size, kv_heads, options, head_order, shard)
        self.has_plain_heads = not self.num_gates and _are_plain(heads, options)
        self.heads = first_head, num_heads
        self.sinks = shard.parameter(local_heads, dtype=torch.float32) if options.sinks else None
        spec = AttentionSpec(
            local_heads,
            kv_heads.count,
            head_dim,
            head_dim**-0.5 if options.scale is None else options.scale,
            options.softcap,
            self.sinks,
            options.kv_scales,
            heads.v_head_dim,
        )
        self.attention = Attention(spec, options.values)
        self.o_proj = RowParallelLinear(
            num_heads * heads.v_head_dim, hidden_size, shard.at("o_proj"), bias=options.output_bias
        )

    @property
    def input_form(self) -> RowForm | None:
        """Returns how inputs are best given; see `LinearMethod`. An indexer reads them plain."""
        return None if self.indexer is not None else self.qkv_proj.input_form

    def forward(
        self,
        x: Rows | UnnormedRows,
        stream: ResidualStream,
        kv_cache: PagedKV | IndexedKV,
        inputs: AttentionInputs,
        kept: Tensor | None = None,
    ) -> None:
        """Attends for `x`, [T, H], normed or to be normed. The stream goes on with the rows `kept`
        [n] alone; None: with all."""
        heads = gates = index = blocks = None
        if isinstance(kv_cache, IndexedKV):
            index = kv_cache.index
            kv_cache = kv_cache.kv
        if self.has_plain_heads and isinstance(kv_cache, Tensor):
            heads = self.qkv_proj.heads(x, _places(kv_cache, inputs))
        if heads is None:
            normed = x.normed() if isinstance(x, UnnormedRows) else x
            if self.indexer is not None and index is not None:
                blocks = self.indexer(normed, index, inputs)
            heads, gates = self._written(self.qkv_proj(normed), kv_cache, inputs)
        heads = heads.flatten(1)
        inputs.scale_queries(heads[:, : self.attention.spec.query_width])
        attended: Tensor = self.attention(heads, kv_cache, inputs, kept, blocks)
        if kept is not None:
            stream.keep(kept)
        if gates is not None:
            gates = gates if kept is None else gates.index_select(0, kept)
            gate = ops.softplus_and_mul if self.has_softplus else ops.sigmoid_and_mul
            attended = gate(attended, gates)
        self.o_proj.add_to(stream, attended, self.norm)

    def _written(
        self, projected: Tensor, kv_cache: PagedKV, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor | None]:
        """Rotates what was projected and writes keys and values. Returns heads, and the gates of
        the query's, [T, Hq * Dv] or [T, Hq]; None: they have none."""
        gates, qkv = None, projected
        if self.num_gates:
            gates, qkv = projected[:, : self.num_gates], projected[:, self.num_gates :]
            if self.gate_bias is not None:
                count = len(self.gate_bias)
                of_heads = gates.view(len(gates), count, self.num_gates // count)
                of_heads.add_(self.gate_bias[:, None])
        q_weight = k_weight = None
        if isinstance(self.q_norm, SplitRMSNorm) and isinstance(self.k_norm, SplitRMSNorm):
            q, k = self.q_norm.weight.numel(), self.k_norm.weight.numel()
            qkv[:, :q] = self.q_norm(qkv[:, :q])
            qkv[:, q : q + k] = self.k_norm(qkv[:, q : q + k])
        else:
            q_weight, k_weight = (
                None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm)
            )
            if k_weight is None:
                k_weight = q_weight  # There are no keys, or no norms.
        heads = self.attention.write(qkv, kv_cache, inputs, q_weight, k_weight, self.eps)
        return heads, gates

    def checkpoint_weights(
        self, prefix: str, *, is_fused: bool, cut_for: int = 0
    ) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors; `is_fused` says that queries, keys and values are one
        tensor, `cut_for` for how many ranks it is cut; 0: for none.
        """
        names = ("qkv_proj",) if is_fused else self.qkv_proj.names
        if cut_for > 0:
            yield from self.qkv_proj.cut_weights(f"{prefix}.qkv_proj", cut_for)
        else:
            yield from self.qkv_proj.checkpoint_weights(*(f"{prefix}.{name}" for name in names))
        yield from self.o_proj.checkpoint_weights(f"{prefix}.o_proj")
        if self.indexer is not None:
            yield from self.indexer.checkpoint_weights(prefix)
        first, total = self.heads
        for parameter, name in ((self.sinks, "sinks"), (self.gate_bias, "gate_bias")):
            if parameter is not None:
                yield CheckpointWeight(f"{prefix}.{name}", parameter, (total,), 0, first)
        for norm, name in ((self.q_norm, "q_norm"), (self.k_norm, "k_norm")):
            if norm is not None:
                yield from norm.checkpoint_weights(f"{prefix}.{name}")


def _places(kv_cache: Tensor, inputs: AttentionInputs) -> HeadPlaces:
    """Returns where the heads of a step go."""
    return HeadPlaces(
        inputs.positions,
        inputs.cos_sin_cache,
        kv_cache,
        inputs.slot_mapping,
        keep_kv=inputs.backend.reads_new_keys(inputs.metadata),
    )


def _are_plain(heads: HeadSizes, options: AttentionOptions) -> bool:
    """Returns whether nothing is done to heads but that they turn."""
    return (
        options.head_norm == "none"
        and options.indexer is None
        and options.has_kv
        and options.kv_scales is None
        and options.values.is_plain
        and heads.v_head_dim == heads.head_dim
    )


def _block_indexer(
    hidden_size: int,
    kv_heads: HeadRange,
    options: AttentionOptions,
    order: Tensor | None,
    shard: Shard,
) -> BlockIndexer | None:
    """Returns what chooses blocks for these KV heads, this rank's."""
    if options.indexer is None:
        return None
    rest = {"eps": options.eps, "norm_offset": options.norm_offset}
    return BlockIndexer(hidden_size, options.indexer, kv_heads, shard, order=order, **rest)


def _head_norm(
    heads: HeadRange,
    total: int,
    head_dim: int,
    options: AttentionOptions,
    order: Tensor | None,
    shard: Shard,
) -> RMSNorm | SplitRMSNorm | None:
    """Returns the norm of this rank's queries or keys, which have `total` heads on all ranks."""
    if options.head_norm == "none" or heads == NO_HEADS:
        return None
    if options.head_norm == "each":
        if not options.has_norm_weights:
            return RMSNorm(head_dim, options.eps, shard, has_weight=False)
        return RMSNorm(head_dim, options.eps, shard, offset=options.norm_offset, order=order)
    return SplitRMSNorm(
        heads.start * head_dim,
        heads.count * head_dim,
        total * head_dim,
        options.eps,
        shard,
        order=None if order is None else repeated(order, heads.count),
    )

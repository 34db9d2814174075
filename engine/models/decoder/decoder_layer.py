"""One layer of the decoder in `engine.models.decoder.decoder`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from engine.config import EngineConfig
from engine.layers.attention.block import AttentionBlock
from engine.layers.attention.latent.latent_block import LatentAttentionBlock
from engine.layers.feed_forward.paired_mlp import PairedMLP
from engine.layers.feed_forward.sparse_mlp import SparseMLP
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.rows import Rows, UnnormedRows
from engine.layers.shard import CheckpointWeight, Shard
from engine.models.decoder.attention_block import AnyAttention, mixing_block
from engine.models.decoder.embeddings import layer_input
from engine.models.decoder.expert_block import mlp_block, mlp_weights
from engine.models.decoder.layer_kinds import LayerInputs, routed_slots
from engine.models.decoder.layer_norms import layer_norm, norm_weights
from engine.models.decoder.streams import LayerStreams, end_layer, enter
from engine.models.specs.dense import DenseSpec
from tandem_kernels.attention.index_pages import LayerCache


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each between the norms that the architecture has there.

    Attributes:
        keeps_rows: `forward` takes rows to be kept.
    """

    before_attention: RMSNorm | None
    before_mlp: RMSNorm | None
    scalar: nn.Parameter | None

    def __init__(self, config: EngineConfig, spec: DenseSpec, shard: Shard, index: int) -> None:
        super().__init__()
        self.self_attn: AnyAttention
        self.spec = spec
        self.norms = names = spec.norms_of(index)
        experts, has_mlp = spec.experts, index not in spec.bare_layers
        self.before_attention = layer_norm(spec, shard, names.before_attention)
        self.streams = LayerStreams(spec, shard, self.before_attention, index)
        after = layer_norm(spec, shard, names.after_attention, spec.after_eps)
        self.module, self.self_attn = mixing_block(config, spec, index, shard, after)
        self.keeps_rows = isinstance(self.self_attn, AttentionBlock)
        self.before_mlp = layer_norm(spec, shard, names.before_mlp) if has_mlp else None
        self.scalar = shard.parameter(1) if spec.scales_layers else None
        after = layer_norm(spec, shard, names.after_mlp, spec.after_eps)
        self.mlp = mlp_block(spec, index, shard, after) if has_mlp else None
        self.input = layer_input(spec, shard)
        self.is_hashed = experts is not None and index in experts.hashed_layers

    def forward(
        self,
        stream: ResidualStream,
        kv_cache: LayerCache,
        inputs: LayerInputs,
        kept: Tensor | None = None,
        given: Tensor | None = None,
    ) -> None:
        """Adds the layer to the stream, which behind attention goes on with the rows `kept` [n]
        alone; None: with all. `given` [T, P]: see `LayerInput`."""
        attention, mlp = self.self_attn, self.mlp
        enter(stream, self.streams.attention)
        rows, slots = self._attended_rows(stream), routed_slots(inputs, self.is_hashed)
        if kept is None:
            attention(rows, stream, kv_cache, inputs)
        else:
            attention(rows, stream, kv_cache, inputs, kept)
            slots = slots.index_select(0, kept)
        enter(stream, self.streams.mlp)
        if isinstance(mlp, SparseMLP | PairedMLP):
            mlp(stream, self.before_mlp, slots)
        elif mlp is not None:
            mlp(stream.read_rows(self.before_mlp, mlp.input_form), stream)
        enter(stream, self.streams.input)
        if self.input is not None and given is not None:
            self.input(stream, given if kept is None else given.index_select(0, kept))
        end_layer(stream)
        if self.scalar is not None:
            stream.scale(self.scalar)

    def _attended_rows(self, stream: ResidualStream) -> Rows | UnnormedRows:
        """Returns the rows of the stream as the layer's attention is best given them."""
        attention, norm = self.self_attn, self.before_attention
        if isinstance(attention, AttentionBlock):
            return stream.read_unnormed(norm, attention.input_form)
        if isinstance(attention, LatentAttentionBlock):
            return stream.read_rows(norm, attention.input_form)
        return stream.read(norm)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        spec, names = self.spec, self.norms
        norms = (
            (self.before_attention, names.before_attention),
            (self.self_attn.norm, names.after_attention),
            (self.before_mlp, names.before_mlp),
            (None if self.mlp is None else self.mlp.norm, names.after_mlp),
        )
        yield from norm_weights(prefix, norms)
        yield from self.streams.checkpoint_weights(prefix)
        if self.scalar is not None:
            yield CheckpointWeight(f"{prefix}.layer_scalar", self.scalar, (1,))
        name, own = f"{prefix}.{self.module}".rstrip("."), self.self_attn
        if isinstance(own, AttentionBlock):
            fused, ranks = spec.fused_qkv, spec.projection_ranks
            yield from own.checkpoint_weights(name, is_fused=fused, cut_for=ranks)
        else:
            yield from own.checkpoint_weights(name)
        if self.mlp is not None:
            yield from mlp_weights(self.mlp, spec, prefix)
        if self.input is not None:
            yield from self.input.checkpoint_weights(prefix)

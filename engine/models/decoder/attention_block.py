"""Builds the block of a layer that looks at other tokens, from what its spec says."""

from __future__ import annotations

from dataclasses import replace

from engine.config import EngineConfig
from engine.layers.attention.block import AttentionBlock, AttentionOptions
from engine.layers.attention.index.block_indexer import BlockIndexerSizes
from engine.layers.attention.index.indexer import IndexerSizes
from engine.layers.attention.latent.latent_block import LatentAttentionBlock, LatentSizes
from engine.layers.attention.rows.row_indexer import RowIndexerSizes
from engine.layers.attention.rows.window_rows_block import WindowRowsBlock, WindowRowsSizes
from engine.layers.kv_scales import layer_scales
from engine.layers.norm import RMSNorm
from engine.layers.shard import Shard
from engine.layers.states.kimi_delta import KimiDeltaAttention
from engine.layers.states.lightning import LightningAttention, LightningSizes
from engine.layers.states.linear_attention import DeltaForm, DeltaSizes, GatedDeltaNet
from engine.layers.states.mamba import MambaMixer, MambaSizes
from engine.layers.states.parallel_mixer import ParallelMixer
from engine.layers.states.short_conv import ShortConv
from engine.models.specs.dense import DenseSpec
from engine.models.specs.lightning import LightningSpec
from engine.models.specs.linear import DeltaSpec
from engine.models.specs.token_rows import TokenRowsSpec
from engine.rope import Rotary
from tandem_kernels.attention.block_choice import BlockChoice
from tandem_kernels.attention.value_form import ValueForm

StateBlock = GatedDeltaNet | KimiDeltaAttention | LightningAttention | MambaMixer | ShortConv
_LEAST_PACE = 1e-5
"""The last layer has no more: it hardly forgets."""
AnyAttention = AttentionBlock | LatentAttentionBlock | WindowRowsBlock | StateBlock | ParallelMixer


def mixing_block(
    config: EngineConfig, spec: DenseSpec, index: int, shard: Shard, norm: RMSNorm | None
) -> tuple[str, AnyAttention]:
    """Returns what layer `index` looks at other tokens with, and its name in the checkpoint; "": it
    has several. `norm` is that of what it adds."""
    states = spec.states
    if states is not None and states.beside_attention:
        return "", parallel_mixer(config, spec, index, shard)
    if states is not None and index in states.layers:
        return states.module, state_block(config, spec, index, shard.at(states.module), norm)
    name = "self_attn" if spec.rows_of_tokens is None else "attn"
    return name, attention_block(config, spec, index, shard.at(name), norm)


def attention_block(
    config: EngineConfig, spec: DenseSpec, index: int, shard: Shard, norm: RMSNorm | None
) -> AttentionBlock | LatentAttentionBlock | WindowRowsBlock:
    """Returns the block of layer `index`, not yet loaded; `norm` is that of what it adds."""
    heads, source = config.model.heads_of(index), spec.kv_source(index)
    head_order = spec.rotary_of(index).head_order(heads.head_dim)
    if (rows := spec.rows_of_tokens) is not None:
        sizes_of_rows = _row_sizes(rows, index, spec.rms_norm_eps)
        return WindowRowsBlock(spec.hidden_size, heads.num_heads, sizes_of_rows, shard, norm=norm)
    if (latent := spec.latent) is not None:
        sizes = LatentSizes(
            q_rank=latent.q_rank,
            kv_rank=latent.kv_rank,
            nope=latent.nope,
            rope=latent.rope,
            value=latent.value,
            scale=latent.scale,
            rope_order=head_order,
        )
        return LatentAttentionBlock(
            spec.hidden_size,
            heads.num_heads,
            sizes,
            shard,
            norm=norm,
            kv_scales=layer_scales(config.cache.kv_scales, index, 1, shard),
            indexer=_indexer_sizes(spec, index, latent.rope),
            gates=latent.gates,
        )
    options = AttentionOptions(
        bias=spec.attention_bias,
        output_bias=spec.output_bias,
        sinks=index in spec.sink_layers,
        head_norm=spec.head_norm,
        eps=spec.rms_norm_eps,
        norm_offset=spec.norm_offset,
        has_norm_weights=not spec.has_plain_head_norms,
        scale=spec.attention_scale,
        softcap=spec.attention_softcap,
        head_order=head_order,
        output_gate=spec.output_gate,
        gate_activation=spec.gate_activation,
        gate_name=spec.gate_name,
        gate_bias=spec.gate_bias,
        shares_keys=index in spec.shared_projections,
        has_kv=source == index,
        values=ValueForm(normed=spec.value_norm, scale=spec.value_scale),
        kv_scales=layer_scales(config.cache.kv_scales, source, heads.num_kv_heads, shard),
        indexer=_block_indexer_sizes(spec, index),
    )
    return AttentionBlock(
        spec.hidden_size,
        heads,
        shard,
        options,
        norm=norm,
    )


def _row_sizes(rows: TokenRowsSpec, index: int, eps: float) -> WindowRowsSizes:
    indexer = None
    if chooses := rows.chooses(index):
        of = rows.indexer
        indexer = RowIndexerSizes(heads=of.heads, dim=of.dim, top_k=of.top_k)
    return WindowRowsSizes(
        q_rank=rows.q_rank,
        head_dim=rows.head_dim,
        groups=rows.groups,
        group_rank=rows.group_rank,
        eps=eps,
        tokens=rows.ratio_of(index),
        overlap=chooses,
        indexer=indexer,
    )


def _indexer_sizes(spec: DenseSpec, index: int, rope: int) -> IndexerSizes | None:
    indexer = spec.indexer_of(index)
    if indexer is None:
        return None
    rotary = Rotary(theta=1.0, dim=rope, interleaved=indexer.interleaved)
    return IndexerSizes(
        heads=indexer.heads,
        dim=indexer.dim,
        rope=rope,
        top_k=indexer.top_k,
        rope_order=rotary.head_order(rope),
    )


def _block_indexer_sizes(spec: DenseSpec, index: int) -> BlockIndexerSizes | None:
    indexer = spec.block_indexer_of(index)
    if indexer is None:
        return None
    choice = BlockChoice(indexer.size, indexer.top_k, indexer.local)
    return BlockIndexerSizes(groups=indexer.heads, dim=indexer.dim, choice=choice)


def state_block(
    config: EngineConfig, spec: DenseSpec, index: int, shard: Shard, norm: RMSNorm | None
) -> StateBlock:
    """Returns the block of layer `index`, which keeps a state, not yet loaded."""
    hidden_size, eps = spec.hidden_size, spec.rms_norm_eps
    drafting = config.scheduler.max_num_seqs, config.decode_query_len
    kept = drafting if config.decode_query_len > 1 else None
    if (mamba := spec.mamba) is not None:
        sizes = MambaSizes(
            heads=mamba.heads,
            groups=mamba.groups,
            head_dim=mamba.head_dim,
            size=mamba.size,
            kernel=mamba.kernel,
            conv_bias=mamba.conv_bias,
            is_normed=mamba.is_normed,
            input_scales=mamba.input_scales,
            output_scale=mamba.output_scale,
        )
        return MambaMixer(hidden_size, sizes, mamba.eps, shard, norm=norm, drafting=kept)
    if (conv := spec.conv) is not None:
        return ShortConv(hidden_size, conv.kernel, shard, norm=norm, drafting=kept)
    if (lightning := spec.lightning) is not None:
        own = _lightning_sizes(lightning, index, config.model.num_layers, eps)
        return LightningAttention(hidden_size, own, shard, norm=norm, drafting=kept)
    if (kda := spec.kda) is not None:
        delta = replace(_delta_sizes(kda), decay_floor=kda.floor)
        rank = kda.key_dim if kda.is_narrow else 0
        return KimiDeltaAttention(
            hidden_size, delta, eps, shard, rank=rank, is_mixed=kda.is_mixed, norm=norm,
            drafting=kept,
        )  # fmt: skip
    linear = spec.linear
    assert linear is not None
    form: DeltaForm = "split" if linear.is_split else "by_key_head"
    return GatedDeltaNet(
        hidden_size,
        _delta_sizes(linear, linear.rate_scale),
        eps if linear.eps is None else linear.eps,
        shard,
        form="apart" if linear.is_apart else form,
        norm=norm,
        drafting=kept,
    )


def _lightning_sizes(
    lightning: LightningSpec, index: int, num_layers: int, eps: float
) -> LightningSizes:
    """Returns the sizes of layer `index`: later ones forget more slowly."""
    rotary, dim = lightning.rotary, lightning.head_dim
    behind = index / (num_layers - 1 + lightning.layer_eps)
    return LightningSizes(
        heads=lightning.heads,
        head_dim=dim,
        groups=lightning.groups,
        eps=lightning.eps,
        pace=1 - behind + _LEAST_PACE,
        by_head=lightning.by_head,
        head_eps=0.0 if rotary is None else eps,
        head_order=None if rotary is None else rotary.head_order(dim),
    )


def _delta_sizes(delta: DeltaSpec, rate_scale: float = 1.0) -> DeltaSizes:
    return DeltaSizes(
        key_heads=delta.key_heads,
        value_heads=delta.value_heads,
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
        kernel=delta.kernel,
        rate_scale=rate_scale,
    )


def parallel_mixer(
    config: EngineConfig, spec: DenseSpec, index: int, shard: Shard
) -> ParallelMixer:
    """Returns the block of a layer that attends and keeps a state, not yet loaded."""
    assert spec.mamba is not None
    name = spec.mamba.module
    attention = attention_block(config, spec, index, shard.at("self_attn"), None)
    mixer = state_block(config, spec, index, shard.at(name), None)
    assert isinstance(attention, AttentionBlock) and isinstance(mixer, MambaMixer)
    return ParallelMixer(attention, mixer, name)

"""Builds the block of a mixture of experts from what its spec says."""

from __future__ import annotations

from collections.abc import Iterator

from engine.layers.expert_share import ExpertShare
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.router import Router, RouterOptions
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.shared_expert import SharedExpert
from engine.layers.sparse_mlp import Experts, SparseMLP
from engine.models.specs.dense import DenseSpec
from engine.models.specs.experts import ExpertNames, ExpertSpec
from tandem_kernels.elementwise.clamped_gate import ClampedGate


def sparse_mlp(
    hidden_size: int, spec: ExpertSpec, shard: Shard, norm: RMSNorm | None = None
) -> SparseMLP:
    """Returns one layer's block, not yet loaded; `norm` is that of what it adds."""
    names = spec.names
    shard = shard.at(names.block)
    options = RouterOptions(
        top_k=spec.top_k,
        sigmoid=spec.sigmoid,
        renormalise=spec.renormalise,
        scaling=spec.scaling,
        num_groups=spec.num_groups,
        top_groups=spec.top_groups,
        has_bias=spec.choice_bias,
        has_logit_bias=spec.router_bias,
    )
    shared = None
    if spec.shared_size:
        shared = SharedExpert(
            hidden_size, spec.shared_size, shard.at(names.shared), has_gate=spec.shared_gate
        )
    share = ExpertShare.of(spec.count, shard.place.expert_ranks)
    return SparseMLP(
        Router(hidden_size, spec.count, options, shard, share),
        Experts(
            share,
            hidden_size,
            spec.intermediate_size,
            shard.at("experts"),
            (names.gate, names.up, names.down),
            biases=spec.biases,
            stacked=spec.stacked,
            gate=ClampedGate(spec.gate_limit, spec.gate_alpha) if spec.gate_limit else None,
        ),
        shared,
        shard,
        norm=norm,
    )


def mlp_block(
    spec: DenseSpec, index: int, shard: Shard, norm: RMSNorm | None
) -> GatedMLP | SparseMLP:
    """Returns the feed-forward block of layer `index`, [T, H] -> [T, H], not yet loaded; `norm` is
    that of what it adds."""
    if spec.experts is not None and index not in spec.experts.dense_layers:
        return sparse_mlp(spec.hidden_size, spec.experts, shard, norm)
    return GatedMLP(
        spec.hidden_size,
        spec.intermediate_size,
        shard.at("mlp"),
        is_gelu=spec.activation == "gelu_tanh",
        norm=norm,
    )


def expert_weights(block: SparseMLP, names: ExpertNames, prefix: str) -> Iterator[CheckpointWeight]:
    """Lists the checkpoint's tensors of one layer's block; `prefix` is the layer's name."""
    own = f"{prefix}.{names.block}"
    yield from block.router.checkpoint_weights(
        *(f"{own}.{name}" for name in (names.router, names.choice_bias, names.router_bias))
    )
    yield from block.experts.checkpoint_weights(f"{own}.experts")
    if block.shared is not None:
        yield from block.shared.checkpoint_weights(
            f"{own}.{names.shared}", f"{own}.{names.shared}_gate.weight"
        )

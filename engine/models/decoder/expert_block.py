"""Builds the feed-forward blocks of layers from what their spec says."""

from __future__ import annotations

from collections.abc import Iterator

from engine.layers.feed_forward.expert_share import ExpertShare
from engine.layers.feed_forward.mlp import CutGateMLP, DenseMLP, GatedMLP, SquaredMLP
from engine.layers.feed_forward.paired_mlp import PairedMLP
from engine.layers.feed_forward.router import Router, RouterOptions
from engine.layers.feed_forward.shared_expert import SharedExpert
from engine.layers.feed_forward.sparse_mlp import Experts, LatentProjections, SparseMLP
from engine.layers.norm import RMSNorm
from engine.layers.shard import CheckpointWeight, Shard
from engine.models.specs.dense import DenseSpec
from engine.models.specs.experts import ExpertSpec
from tandem_kernels.elementwise.gate_form import GateForm

Block = DenseMLP | SparseMLP | PairedMLP


def sparse_mlp(
    hidden_size: int,
    spec: ExpertSpec,
    shard: Shard,
    norm: RMSNorm | None = None,
    *,
    eps: float = 0.0,
    index: int = 0,
) -> SparseMLP:
    """Returns the block of layer `index`, not yet loaded; `norm` is that of what it adds. `eps`: of
    norms inside it."""
    names = spec.names
    inner = shard.at(names.block)
    share = ExpertShare.of(spec.count, shard.place.expert_ranks)
    router_norm = input_norm = None
    if names.router_norm:
        router_norm = RMSNorm(hidden_size, eps, shard, factor=hidden_size**-0.5)
    if names.input_norm:
        input_norm = RMSNorm(hidden_size, eps, shard)
    return SparseMLP(
        Router(hidden_size, spec.count, _router_options(spec, index), inner, share, router_norm),
        Experts(
            share,
            spec.latent_size or hidden_size,
            spec.intermediate_size,
            inner.at("experts"),
            (names.gate, names.up, names.down),
            biases=spec.biases,
            stacked=spec.stacked,
            gate=_gate(spec, spec.limit_of(index)),
        ),
        _shared_expert(hidden_size, spec, inner, index),
        inner,
        norm=norm,
        input_norm=input_norm,
        latents=_latents(hidden_size, spec, inner, eps),
    )


def _router_options(spec: ExpertSpec, index: int) -> RouterOptions:
    is_hashed = index in spec.hashed_layers
    return RouterOptions(
        top_k=spec.top_k,
        sigmoid=spec.sigmoid,
        renormalise=spec.renormalise,
        scaling=spec.scaling,
        num_groups=spec.num_groups,
        top_groups=spec.top_groups,
        has_bias=spec.choice_bias and not is_hashed,
        root_softplus=spec.root_softplus,
        table_size=spec.hashed_tokens if is_hashed else 0,
        has_logit_bias=spec.router_bias,
        has_scales=bool(spec.names.expert_scales),
    )


def _shared_expert(
    hidden_size: int, spec: ExpertSpec, inner: Shard, index: int
) -> SharedExpert | None:
    """Returns the expert that every token has; None: there is none."""
    if not spec.shared_size:
        return None
    return SharedExpert(
        hidden_size,
        spec.shared_size,
        inner.at(spec.names.shared),
        has_gate=spec.shared_gate,
        form=_dense_gate(spec, index),
        squared=spec.squared,
    )


def _latents(
    hidden_size: int, spec: ExpertSpec, inner: Shard, eps: float
) -> LatentProjections | None:
    """Returns the projections around routed experts; None: there are none."""
    if spec.latent_size == 0:
        return None
    names = spec.names.to_latent, spec.names.from_latent, spec.names.latent_norm
    return LatentProjections(hidden_size, spec.latent_size, eps, inner, names)


def _gate(spec: ExpertSpec, limit: float) -> GateForm | None:
    if spec.squared:
        return GateForm("relu_squared")
    if spec.gelu:
        return GateForm("gelu_tanh")
    if spec.soft_bounds is not None:
        return _situ(spec.soft_bounds)
    if spec.caps > 0.0:
        return GateForm("capped", spec.caps)
    if limit > 0.0:
        return GateForm("limited", limit)
    return GateForm("clamped", spec.gate_limit, spec.gate_alpha) if spec.gate_limit else None


def _situ(bounds: tuple[float, float]) -> GateForm:
    of_gate, of_up = bounds
    return GateForm("situ", limit=of_up, alpha=of_gate)


def _dense_gate(spec: ExpertSpec, index: int) -> GateForm | None:
    """Returns the activation of blocks that every token goes through, if it has a limit."""
    if spec.soft_bounds is not None:
        return _situ(spec.soft_bounds)
    if spec.caps > 0.0:
        return GateForm("capped", spec.caps)
    if spec.clamps_dense:
        return GateForm("clamped", spec.gate_limit, spec.gate_alpha)
    limit = spec.dense_limit_of(index)
    return GateForm("limited", limit) if limit > 0.0 else None


def mlp_block(spec: DenseSpec, index: int, shard: Shard, norm: RMSNorm | None) -> Block:
    """Returns the feed-forward block of layer `index`, [T, H] -> [T, H], not yet loaded; `norm` is
    that of what it adds."""
    experts, eps = spec.experts, spec.rms_norm_eps
    if experts is None or index in experts.dense_layers:
        return _dense_mlp(spec, index, shard, norm)
    if not experts.stands_beside_dense:
        return sparse_mlp(spec.hidden_size, experts, shard, norm, eps=eps, index=index)
    assert norm is not None
    return PairedMLP(
        _dense_mlp(spec, index, shard, None),
        sparse_mlp(spec.hidden_size, experts, shard, eps=eps),
        (RMSNorm(spec.hidden_size, eps, shard), RMSNorm(spec.hidden_size, eps, shard)),
        norm,
    )


def _dense_mlp(spec: DenseSpec, index: int, shard: Shard, norm: RMSNorm | None) -> DenseMLP:
    if spec.activation == "relu_squared":
        units, inner = spec.units_of(index), shard.at(spec.mlp_module)
        return SquaredMLP(spec.hidden_size, units, inner, norm=norm)
    if cutoff := spec.gate_cutoff(index):
        units, inner = spec.units_of(index), shard.at(spec.mlp_module)
        return CutGateMLP(spec.hidden_size, units, inner, cutoff, norm)
    return GatedMLP(
        spec.hidden_size,
        spec.units_of(index),
        shard.at(spec.mlp_module),
        is_gelu=spec.activation == "gelu_tanh",
        gate=None if spec.experts is None else _dense_gate(spec.experts, index),
        norm=norm,
        scales=spec.unit_scales,
    )


def mlp_weights(block: Block, spec: DenseSpec, prefix: str) -> Iterator[CheckpointWeight]:
    """Lists the checkpoint's tensors of one layer's block; `prefix` is the layer's name."""
    if isinstance(block, PairedMLP):
        assert spec.experts is not None
        names = spec.experts.names
        for norm, name in (
            (block.dense_norm, names.dense_norm),
            (block.sparse_norm, names.sparse_norm),
        ):
            yield from norm.checkpoint_weights(f"{prefix}.{name}")
        yield from mlp_weights(block.dense, spec, prefix)
        yield from expert_weights(block.sparse, spec, prefix)
    elif isinstance(block, SparseMLP):
        yield from expert_weights(block, spec, prefix)
    else:
        name = f"{prefix}.{spec.mlp_module}"
        yield from block.checkpoint_weights(name, is_fused=spec.fused_gate_up)


def expert_weights(block: SparseMLP, spec: DenseSpec, prefix: str) -> Iterator[CheckpointWeight]:
    """Lists the checkpoint's tensors of one layer's experts; `prefix` is the layer's name."""
    assert spec.experts is not None
    names = spec.experts.names
    own = f"{prefix}.{names.block}"
    of_router = (
        names.router, names.choice_bias, names.router_bias, names.expert_scales, names.router_norm,
        names.table,
    )  # fmt: skip
    yield from block.router.checkpoint_weights(*(f"{own}.{name}" for name in of_router))
    yield from block.experts.checkpoint_weights(f"{own}.experts")
    if block.shared is not None:
        name = f"{own}.{names.shared}"
        yield from block.shared.checkpoint_weights(
            name, f"{name}_gate.weight", is_fused=spec.fused_gate_up
        )
    if block.latents is not None:
        yield from block.latents.checkpoint_weights(own)
    if block.input_norm is not None:
        yield from block.input_norm.checkpoint_weights(f"{prefix}.{names.input_norm}")

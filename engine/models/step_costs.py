"""Finds the coefficients of the contracts' `step_work` of a model from its spec. Torch-free.

Every rank has its share of the linear layers; routers and the projections to latents are whole on
each. Weights count as they are stored: FP8 takes a byte and its scale, four bits half of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.contracts.steps.step_work import AttentionCost, ExpertCost, ModelCost
from engine.models.registry import spec_of
from engine.models.specs.dense import DenseSpec
from engine.models.specs.experts import ExpertSpec
from engine.models.specs.token_rows import TokenRowsSpec
from engine.quantization import (
    Fp8Scheme,
    Int4Scheme,
    Int8Scheme,
    Mxfp4Scheme,
    Mxfp8Scheme,
    Nvfp4Scheme,
    Scheme,
)
from kv_transfer.group_sizes import INDEX_PLANE, INDEX_SCALE_PLANE
from kv_transfer.layout import DTYPE_BYTES, KVGroup


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear layer, or all experts of a layer: `top_k` of `count` are computed for a token."""

    name: str
    inputs: int
    outputs: int
    is_shared: bool = True
    """Ranks have a part each; else all of it."""


def cost_of(config: EngineConfig) -> ModelCost | None:
    """Returns the coefficients of one rank; None for an architecture that is not described."""
    spec = spec_of(config.model)
    return _Costs(config, spec).model() if isinstance(spec, DenseSpec) else None


class _Costs:
    def __init__(self, config: EngineConfig, spec: DenseSpec) -> None:
        self._config = config
        self._model = config.model
        self._spec = spec
        self._ranks = config.parallel.tensor_parallel_size
        self._states = spec.states

    def model(self) -> ModelCost:
        spec, model = self._spec, self._model
        head = _Linear("lm_head", spec.hidden_size, model.vocab_size)
        dense = [layer for i in range(model.num_layers) for layer in self._layer(i)]
        experts = spec.experts
        flops = sum(map(self._flops, dense)) + self._state_flops()
        weights = sum(map(self._bytes, [*dense, head]))
        cost = None
        if experts is not None:
            routed = [layer for i in self._expert_layers(experts) for layer in self._expert(i)]
            flops += experts.top_k * sum(map(self._flops, routed))
            each = sum(map(self._bytes, routed))
            cost = ExpertCost(count=experts.count, top_k=experts.top_k, bytes_each=each)
        return ModelCost(
            flops_per_token=flops,
            flops_per_sample=self._flops(head),
            weight_bytes=weights,
            token_bytes=spec.hidden_size * DTYPE_BYTES[model.dtype] / self._ranks,
            attention=tuple(self._attention()),
            experts=cost,
            state_bytes=self._state_bytes(),
        )

    # Linear layers ----------------------------------------------------------------------------

    def _layer(self, index: int) -> Iterator[_Linear]:
        """Yields a layer's linear layers that every token goes through."""
        if (states := self._states) is not None and index in states.layers:
            for name, inputs, outputs in states.projections(self._spec.hidden_size):
                yield _Linear(f"model.layers.{index}.{states.module}.{name}", inputs, outputs)
        if states is None or states.leaves_attention(index):
            yield from self._attention_linears(index)
        if index in self._spec.bare_layers:
            return
        experts, hidden = self._spec.experts, self._spec.hidden_size
        is_dense = experts is None or index in experts.dense_layers
        if experts is None or is_dense or experts.stands_beside_dense:
            name = f"model.layers.{index}.{self._spec.mlp_module}"
            is_gated = self._spec.activation != "relu_squared"
            yield from _feed_forward(name, hidden, self._spec.units_of(index), is_gated)
        if (size := self._spec.layer_input_size) > 0:
            for name in ("per_layer_input_gate", "per_layer_projection", "projection"):
                yield _Linear(f"model.layers.{index}.{name}", hidden, size, is_shared=False)
        if experts is None or is_dense:
            return
        block = f"model.layers.{index}.{experts.names.block}"
        yield _Linear(f"{block}.gate", hidden, experts.count, is_shared=False)
        if (size := experts.latent_size) > 0:
            yield _Linear(f"{block}.{experts.names.to_latent}", hidden, size, is_shared=False)
            is_cut = bool(experts.names.latent_norm)
            yield _Linear(f"{block}.{experts.names.from_latent}", size, hidden, is_shared=is_cut)
        if experts.shared_size:
            name = f"{block}.{experts.names.shared}"
            yield from _feed_forward(name, hidden, experts.shared_size, not experts.squared)
            if experts.shared_gate:
                yield _Linear(f"{block}.shared_expert_gate", hidden, 1, is_shared=False)

    def _attention_linears(self, index: int) -> Iterator[_Linear]:
        if (rows := self._spec.rows_of_tokens) is not None:
            yield from self._rows(f"model.layers.{index}.attn", rows, index)
        elif self._spec.latent is not None:
            yield from self._latent(f"model.layers.{index}.self_attn")
            yield from self._indexer(f"model.layers.{index}.self_attn.indexer", index)
        else:
            yield from self._heads(index)

    def _heads(self, layer: int) -> Iterator[_Linear]:
        heads, hidden = self._model.heads_of(layer), self._spec.hidden_size
        name, attended = f"model.layers.{layer}.self_attn", heads.num_heads * heads.v_head_dim
        gates = {"none": 0, "per_head": heads.num_heads}.get(self._spec.output_gate, attended)
        # Where ranks outnumber KV heads, several have the same one.
        kv_heads = max(heads.num_kv_heads, self._ranks)
        yield _Linear(f"{name}.q_proj", hidden, heads.num_heads * heads.head_dim + gates)
        if self._spec.kv_source(layer) == layer:
            yield _Linear(f"{name}.k_proj", hidden, kv_heads * heads.head_dim)
            yield _Linear(f"{name}.v_proj", hidden, kv_heads * heads.v_head_dim)
        yield _Linear(f"{name}.o_proj", attended, hidden)
        if (indexer := self._spec.block_indexer_of(layer)) is not None:
            groups = max(indexer.heads, self._ranks)
            yield _Linear(f"{name}.index_q_proj", hidden, groups * indexer.dim)
            yield _Linear(f"{name}.index_k_proj", hidden, indexer.dim, is_shared=False)

    def _latent(self, name: str) -> Iterator[_Linear]:
        sizes, hidden, heads = self._spec.latent, self._spec.hidden_size, self._model.num_heads
        assert sizes is not None
        queries = heads * (sizes.nope + sizes.rope)
        if sizes.q_rank:
            yield _Linear(f"{name}.q_a_proj", hidden, sizes.q_rank, is_shared=False)
            yield _Linear(f"{name}.q_b_proj", sizes.q_rank, queries)
        else:
            yield _Linear(f"{name}.q_proj", hidden, queries)
        latent = sizes.kv_rank + sizes.rope
        yield _Linear(f"{name}.kv_a_proj_with_mqa", hidden, latent, is_shared=False)
        yield _Linear(f"{name}.kv_b_proj", sizes.kv_rank, heads * (sizes.nope + sizes.value))
        yield _Linear(f"{name}.o_proj", heads * sizes.value, hidden)
        if sizes.gates:
            yield _Linear(f"{name}.g_proj", hidden, heads * sizes.gates)

    def _rows(self, name: str, rows: TokenRowsSpec, layer: int) -> Iterator[_Linear]:
        hidden, queries = self._spec.hidden_size, self._model.num_heads * rows.head_dim
        middle = rows.groups * rows.group_rank
        yield _Linear(f"{name}.wq_a", hidden, rows.q_rank, is_shared=False)
        yield _Linear(f"{name}.wkv", hidden, rows.head_dim, is_shared=False)
        yield _Linear(f"{name}.wq_b", rows.q_rank, queries)
        yield _Linear(f"{name}.wo_a", queries // rows.groups, middle)
        yield _Linear(f"{name}.wo_b", middle, hidden)
        if rows.ratio_of(layer):
            width = rows.left_by_token(layer)
            yield _Linear(f"{name}.compressor.wkv", hidden, width, is_shared=False)
        if rows.chooses(layer):
            of = rows.indexer
            yield _Linear(f"{name}.indexer.wq_b", rows.q_rank, of.heads * of.dim, is_shared=False)
            yield _Linear(f"{name}.indexer.weights_proj", hidden, of.heads, is_shared=False)

    def _indexer(self, name: str, layer: int) -> Iterator[_Linear]:
        sizes, latent = self._spec.indexer_of(layer), self._spec.latent
        if sizes is not None and latent is not None:
            hidden, queries = self._spec.hidden_size, sizes.heads * sizes.dim
            yield _Linear(f"{name}.wq_b", latent.q_rank, queries, is_shared=False)
            yield _Linear(f"{name}.wk", hidden, sizes.dim, is_shared=False)
            yield _Linear(f"{name}.weights_proj", hidden, sizes.heads, is_shared=False)

    def _expert_layers(self, experts: ExpertSpec) -> list[int]:
        others = (*experts.dense_layers, *self._spec.bare_layers)
        return [i for i in range(self._model.num_layers) if i not in others]

    def _expert(self, index: int) -> Iterator[_Linear]:
        """Yields one expert of a layer."""
        experts = self._spec.experts
        assert experts is not None
        name = f"model.layers.{index}.{experts.names.block}.experts.0"
        names, hidden = experts.names, experts.latent_size or self._spec.hidden_size
        for projection in (names.gate, names.up):
            if projection:
                yield _Linear(f"{name}.{projection}", hidden, experts.intermediate_size)
        yield _Linear(f"{name}.{names.down}", experts.intermediate_size, hidden)

    def _share(self, layer: _Linear) -> float:
        return 1 / self._ranks if layer.is_shared else 1.0

    def _flops(self, layer: _Linear) -> float:
        return 2 * layer.inputs * layer.outputs * self._share(layer)

    def _bytes(self, layer: _Linear) -> float:
        quantization = self._model.quantization
        scheme = None if quantization is None else quantization.scheme_of(layer.name)
        each = _bytes_of(scheme, layer.inputs, DTYPE_BYTES[self._model.dtype])
        return layer.inputs * layer.outputs * each * self._share(layer)

    # What is kept of tokens -------------------------------------------------------------------

    def _attention(self) -> Iterator[AttentionCost]:
        layout = self._config.kv_layout
        sources = {layer: self._spec.kv_source(layer) for layer in range(self._model.num_layers)}
        for group in layout.groups:
            if group.is_state or group.is_open:
                continue
            others = [one for one, of in sources.items() if one != of and of in group.layers]
            for chooses in (False, True):
                attending = [
                    layer
                    for layer in (*group.layers, *others)
                    if self._chooses(layer, group) == chooses
                ]
                if not attending:
                    continue
                window = self._spec.dense_tokens if chooses else group.window
                cost = self._attended(group, attending, window)
                if chooses and window is not None and self._spec.latent is not None:
                    yield from _of_chosen_latents(cost, window)
                else:
                    yield cost
            yield from self._index(group)

    def _chooses(self, layer: int, group: KVGroup) -> bool:
        """Returns whether a layer attends to chosen tokens, or rows, of a group."""
        is_window = self._spec.rows_of_tokens is not None and group.compress_ratio == 1
        return self._spec.attends_to_chosen(layer) and not is_window

    def _attended(self, group: KVGroup, attending: list[int], window: int | None) -> AttentionCost:
        pairs = [self._pair_flops(layer) for layer in attending]
        prompts, decodes = (sum(flops) for flops in zip(*pairs, strict=True))
        return AttentionCost(
            window=window,
            flops_of_prompts=prompts / self._ranks / group.compress_ratio,
            flops_of_decodes=decodes / self._ranks / group.compress_ratio,
            kv_bytes=self._row_bytes(group, of_index=False) * len(attending),
        )

    def _index(self, group: KVGroup) -> Iterator[AttentionCost]:
        """Yields the choice of what is attended, in every context: of tokens every rank makes the
        whole, and ranks share that of prompts; of blocks each makes that of its own heads."""
        found = [self._index_flops(layer, group) for layer in group.layers]
        if any(found):
            is_of_heads = any(map(self._spec.block_indexer_of, group.layers))
            yield AttentionCost(
                window=None,
                flops_of_prompts=sum(found) / (1 if is_of_heads else self._ranks),
                flops_of_decodes=sum(found),
                kv_bytes=self._row_bytes(group, of_index=True) * sum(map(bool, found)),
            )

    def _index_flops(self, layer: int, group: KVGroup) -> float:
        """Returns FLOPs of a pair in one layer's indexer; 0: it has none."""
        rows = self._spec.rows_of_tokens
        if rows is not None and rows.chooses(layer) and group.compress_ratio > 1:
            return 2 * rows.indexer.heads * rows.indexer.dim / group.compress_ratio
        if (of_tokens := self._spec.indexer_of(layer)) is not None:
            return 2 * of_tokens.heads * of_tokens.dim
        if (of_blocks := self._spec.block_indexer_of(layer)) is not None:
            return 2 * max(of_blocks.heads, self._ranks) * of_blocks.dim / self._ranks
        return 0.0

    def _row_bytes(self, group: KVGroup, *, of_index: bool) -> float:
        """Returns the bytes of a token in one layer: of its index key, or of all else."""
        of_row = sum(
            plane.heads_of_rank(0, self._ranks).count * plane.row_bytes
            for plane in group.planes
            if (plane.name in (INDEX_PLANE, INDEX_SCALE_PLANE)) == of_index
        )
        return of_row / group.compress_ratio

    def _pair_flops(self, layer: int) -> tuple[int, int]:
        """Returns FLOPs of a pair in one layer, of all heads: scores, and the sum of values."""
        sizes, latent = self._model.heads_of(layer), self._spec.latent
        heads, rows = sizes.num_heads, self._spec.rows_of_tokens
        if latent is None:
            width = sizes.head_dim + sizes.v_head_dim if rows is None else 2 * rows.head_dim
            flops = 2 * heads * width
            return flops, flops
        expanded = latent.nope + latent.rope + latent.value
        absorbed = 2 * latent.kv_rank + latent.rope
        return 2 * heads * expanded, 2 * heads * absorbed

    def _state_flops(self) -> float:
        states = self._states
        if states is None:
            return 0.0
        return states.flops_per_element * states.elements * len(states.layers) / self._ranks

    def _state_bytes(self) -> float:
        states = self._states
        if states is None:
            return 0.0
        planes = states.planes(self._model.dtype)
        return sum(p.heads * p.row_bytes for p in planes) * len(states.layers) / self._ranks


def _of_chosen_latents(cost: AttentionCost, top_k: int) -> Iterator[AttentionCost]:
    """Yields decodes, which read what they chose as it is, and prompts. While a context is short a
    prompt's tokens attend to all of it, expanded; it is longer where the products of the chosen
    rows, absorbed, are fewer, and then costs what these do however long it gets."""
    yield replace(cost, flops_of_prompts=0.0)
    longest = round(top_k * cost.flops_of_decodes / cost.flops_of_prompts)
    yield replace(cost, window=longest, flops_of_decodes=0.0, kv_bytes=0.0)


def _feed_forward(name: str, hidden: int, width: int, is_gated: bool) -> Iterator[_Linear]:
    if is_gated:
        yield _Linear(f"{name}.gate_proj", hidden, width)
    yield _Linear(f"{name}.up_proj", hidden, width)
    yield _Linear(f"{name}.down_proj", width, hidden)


def _bytes_of(scheme: Scheme | None, inputs: int, plain: int) -> float:
    """Returns the bytes of one weight, its part of scales included."""
    match scheme:
        case Fp8Scheme(block=(rows, columns)) if rows:
            return 1 + 4 / (rows * columns)
        case Fp8Scheme():
            return 1.0
        case Int4Scheme(group_size=group, symmetric=symmetric):
            scale = 2 + (0 if symmetric else 0.5)
            return 0.5 + scale / (group if group > 0 else inputs)
        case Int8Scheme(group_size=group):
            return 1 + 4 / (group if group > 0 else inputs)
        case Mxfp4Scheme():
            return 0.5 + 1 / 32
        case Nvfp4Scheme(group_size=group):
            return 0.5 + 1 / group
        case Mxfp8Scheme():
            return 1 + 1 / 32
        case _:
            return float(plain)

"""MiniMax-M3 and M3.1, text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from engine.config import KVLayers, ModelConfig
from engine.models.config_file import ConfigFile, SparseAttentionFields
from engine.models.specs.base import UnsupportedField, of_each_layer
from engine.models.specs.dense import HeadNorm
from engine.models.specs.experts import ExpertNames, first_layers, number_of, sigmoid_experts
from engine.models.specs.indexer import BlockIndexerSpec
from engine.models.specs.kv_planes import planes_of_heads
from engine.models.specs.minimax import MiniMaxM2Spec

_DENSE_SIZE, _SHARED_SIZE = 12_288, 3072
"""transformers takes these where config.json says nothing."""
_SPARSE = "minimax_m3_sparse"
_NAMES = ExpertNames(
    block="block_sparse_moe", gate="w1", up="w3", down="w2", shared="shared_experts",
    choice_bias="e_score_correction_bias",
)  # fmt: skip


class MiniMaxM3Spec(MiniMaxM2Spec, frozen=True, kw_only=True):
    """Heads normalised one by one, norms stored as their distance from 1, gates that are clamped,
    and a shared expert; all layers but some attend to blocks that an indexer chooses for each KV
    head.

    Attributes:
        indexer: Of the layers that have one.
        sparse_layers: Those.
    """

    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"\.mlp\.gate\.e_score_correction_bias$", ".block_sparse_moe.e_score_correction_bias"),
        (r"\.self_attn\.indexer\.(q|k)_(proj|norm)\.", r".self_attn.index_\1_\2."),
    )
    default_head_norm: ClassVar[HeadNorm] = "each"
    norm_offset: ClassVar[float] = 1.0
    num_dense: ClassVar[int | None] = 0
    other_weights: ClassVar[tuple[str, ...]] = ("mtp.", "model.mtp.")

    indexer: BlockIndexerSpec
    sparse_layers: tuple[int, ...] = ()

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        kinds, sparse = file.layer_types, file.sparse_attention_config
        chooses = [kind == _SPARSE for kind in kinds or ()]
        if not kinds and sparse is not None:
            chooses = [bool(flag) for flag in sparse.sparse_attention_freq or ()]
        frequency = file.moe_layer_freq
        of_layers = file.mlp_layer_types
        if of_layers is None and isinstance(frequency, list):
            of_layers = ["sparse" if flag else "dense" for flag in frequency]
        others = [kind for kind in kinds or () if kind != _SPARSE]
        return msgspec.structs.replace(
            file,
            layer_types=others,
            indexer_types=["full" if flag else "none" for flag in chooses] or None,
            mlp_layer_types=of_layers,
            moe_layer_freq=1,
            hidden_act="silu" if file.hidden_act == "swigluoai" else file.hidden_act,
            moe_intermediate_size=file.intermediate_size,
            intermediate_size=file.dense_intermediate_size or _DENSE_SIZE,
            index_n_heads=_said(sparse, "sparse_num_index_heads", file.index_n_heads),
            index_head_dim=_said(sparse, "sparse_index_dim", file.index_head_dim),
            index_block_size=_said(sparse, "sparse_block_size", file.index_block_size),
            index_topk_blocks=_said(sparse, "sparse_topk_blocks", file.index_topk_blocks),
            index_local_blocks=_said(sparse, "sparse_local_block", file.index_local_blocks),
        )

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        kinds = of_each_layer(file, "indexer_types") or ()
        shared = file.shared_intermediate_size
        return {
            "experts": msgspec.structs.replace(
                sigmoid_experts(file, 0, 2.0, renormalises=True),
                dense_layers=first_layers(file, 0),
                shared_size=_SHARED_SIZE if shared is None else shared,
                gate_limit=file.swiglu_limit,
                gate_alpha=file.swiglu_alpha,
                clamps_dense=True,
                names=_NAMES,
            ),
            "sparse_layers": tuple(i for i, kind in enumerate(kinds) if kind == "full"),
            "indexer": BlockIndexerSpec(
                heads=number_of(file, "index_n_heads"),
                dim=number_of(file, "index_head_dim"),
                size=number_of(file, "index_block_size"),
                top_k=number_of(file, "index_topk_blocks"),
                local=file.index_local_blocks or 0,
            ),
        }

    def block_indexer_of(self, layer: int) -> BlockIndexerSpec | None:
        return self.indexer if layer in self.sparse_layers else None

    @property
    def dense_tokens(self) -> int | None:
        return self.indexer.size * self.indexer.top_k if self.sparse_layers else None

    def attends_to_chosen(self, layer: int) -> bool:
        return layer in self.sparse_layers

    def kv_layers(self, model: ModelConfig) -> tuple[KVLayers, ...]:
        """Returns one group, whose layers keep index keys beside keys and values: the few without
        an indexer have room for them, which costs less than pages of their own would."""
        planes = planes_of_heads(model.heads_of(0), model.dtype)
        if self.sparse_layers:
            planes = *planes, self.indexer.plane(model.dtype)
        return (KVLayers(layers=tuple(range(model.num_layers)), planes=planes),)

    def _rare_facts(self, model: ModelConfig) -> tuple[Any, ...]:
        facts = ("indexer", self.indexer), ("sparse_layers", self.sparse_layers)
        return (*super()._rare_facts(model), *facts)

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        heads, dim = number_of(file, "index_n_heads"), number_of(file, "index_head_dim")
        if heads != file.num_kv_heads:
            yield UnsupportedField("sparse_num_index_heads", f"{heads} choices for the KV heads")
        if dim != cls.head_dim_of(file):
            yield UnsupportedField("sparse_index_dim", f"{dim} numbers, unlike heads")
        size, local = number_of(file, "index_block_size"), file.index_local_blocks or 0
        if size < 16 or size & (size - 1):
            yield UnsupportedField("sparse_block_size", f"blocks of {size} tokens")
        if not 0 <= local <= number_of(file, "index_topk_blocks"):
            yield UnsupportedField("sparse_local_block", f"{local} blocks that are always chosen")
        if min(file.swiglu_limit, file.swiglu_alpha) <= 0:
            yield UnsupportedField("swiglu_limit", "a gate without a limit or a slope")
        if (file.scoring_func or "sigmoid") != "sigmoid":
            yield UnsupportedField("scoring_func", repr(file.scoring_func))
        sparse = file.sparse_attention_config or SparseAttentionFields()
        if sparse.sparse_init_block:
            yield UnsupportedField("sparse_init_block", "first blocks that are always chosen")
        if sparse.sparse_score_type != "max":
            yield UnsupportedField("sparse_score_type", repr(sparse.sparse_score_type))
        chooses, without = sparse.sparse_attention_freq, sparse.sparse_disable_index_value
        if any(one and not other for one, other in zip(chooses or (), without or (), strict=False)):
            yield UnsupportedField("sparse_disable_index_value", "values of the indexer")
        for name in ("use_gemma_norm", "use_qk_norm", "use_routing_bias"):
            if getattr(file, name) is False:
                yield UnsupportedField(name, "a layer without it")
        if file.qk_norm_type != "per_head":
            yield UnsupportedField("qk_norm_type", repr(file.qk_norm_type))


def _said(sparse: SparseAttentionFields | None, name: str, flat: int | None) -> int | None:
    """Returns a field of the indexer, by the published name or by that of transformers."""
    said: int | None = None if sparse is None else getattr(sparse, name)
    return flat if said is None else said

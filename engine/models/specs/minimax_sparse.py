"""MiniMax-M3 and M3.1, text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from engine.config import KVLayers, ModelConfig
from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField, of_each_layer
from engine.models.specs.dense import HeadNorm
from engine.models.specs.experts import (
    ExpertNames,
    first_layers,
    gate_limit_of,
    number_of,
    sigmoid_experts,
)
from engine.models.specs.indexer import BlockIndexerSpec
from engine.models.specs.kv_planes import planes_of_heads
from engine.models.specs.minimax import MiniMaxM2Spec
from engine.models.specs.minimax_fields import faults_of, with_common_names

_SHARED_SIZE = 3072
"""transformers takes it where config.json says nothing."""
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
        return with_common_names(file)

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        kinds = of_each_layer(file, "indexer_types") or ()
        shared = file.shared_intermediate_size
        return {
            "experts": msgspec.structs.replace(
                sigmoid_experts(file, 0, 2.0, renormalises=True),
                dense_layers=first_layers(file, 0),
                shared_size=_SHARED_SIZE if shared is None else shared,
                gate_limit=gate_limit_of(file),
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
        yield from faults_of(file, cls.head_dim_of(file))

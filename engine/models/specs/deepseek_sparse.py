"""DeepSeek V3.2 and GLM-5: latent attention to the tokens that an indexer chooses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from engine.config import KVLayers, ModelConfig, ParallelConfig
from engine.models.config.config_file import ConfigFile
from engine.models.errors import CheckpointError
from engine.models.specs.base import UnsupportedField
from engine.models.specs.deepseek import DeepseekV3Spec
from engine.models.specs.experts import number_of
from engine.models.specs.indexer import IndexerSpec
from kv_transfer.stages import stage_starts


class DeepseekV32Spec(DeepseekV3Spec, frozen=True, kw_only=True):
    """A V3 whose layers each have an indexer."""

    interleaved_index: ClassVar[bool] = False

    indexer: IndexerSpec

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        kinds = [kind for kind in file.layer_types or () if kind != "indexed_attention"]
        return msgspec.structs.replace(file, layer_types=kinds)

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        indexer = IndexerSpec(
            heads=number_of(file, "index_n_heads"),
            dim=number_of(file, "index_head_dim"),
            top_k=number_of(file, "index_topk"),
            interleaved=cls.interleaved_index,
        )
        return {**super().read_more(file, max_model_len), "indexer": indexer}

    def indexer_of(self, layer: int) -> IndexerSpec | None:
        return self.indexer

    @property
    def dense_tokens(self) -> int | None:
        return self.indexer.top_k

    def kv_layers(self, model: ModelConfig) -> tuple[KVLayers, ...]:
        """Returns one group, whose layers keep index keys beside latents."""
        (group,) = super().kv_layers(model)
        planes = *group.planes, *self.indexer.planes(model.dtype)
        return (KVLayers(layers=group.layers, planes=planes),)

    def _rare_facts(self, model: ModelConfig) -> tuple[Any, ...]:
        return (*super()._rare_facts(model), ("indexer", self.indexer))

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        if not file.q_lora_rank:
            yield UnsupportedField("q_lora_rank", "an indexer without a latent of queries")
        dim, rope = number_of(file, "index_head_dim"), number_of(file, "qk_rope_head_dim")
        if dim < rope or dim & (dim - 1):
            yield UnsupportedField("index_head_dim", f"{dim}, of which {rope} rotate")


class GlmMoeDsaSpec(DeepseekV32Spec, frozen=True, kw_only=True):
    """GLM-5: a V3.2 of other sizes, whose index keys rotate like latents'.

    Attributes:
        sharing_layers: These have no indexer, and attend to what the last one before them chose.
    """

    default_eps: ClassVar[float] = 1e-5
    interleaved_index: ClassVar[bool] = True

    sharing_layers: tuple[int, ...] = ()
    drafts_choose_once: bool = False

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        sharing = tuple(i for i, kind in enumerate(indexer_types(file)) if kind == "shared")
        more = {"sharing_layers": sharing, "drafts_choose_once": file.index_share_for_mtp_iteration}
        return {**super().read_more(file, max_model_len), **more}

    def indexer_of(self, layer: int) -> IndexerSpec | None:
        return None if layer in self.sharing_layers else self.indexer

    def check_parallel(self, model: ModelConfig, parallel: ParallelConfig) -> None:
        super().check_parallel(model, parallel)
        size = parallel.pipeline_parallel_size
        wrong = set(stage_starts(model.num_layers, size)) & set(self.sharing_layers)
        if wrong:
            raise CheckpointError(
                model.path,
                f"has layer {min(wrong)} attend to what a layer before it chose, and {size} "
                "pipeline stages would part them",
                "choose another pipeline_parallel_size",
            )

    def _rare_facts(self, model: ModelConfig) -> tuple[Any, ...]:
        return (*super()._rare_facts(model), ("sharing_layers", self.sharing_layers))


def indexer_types(file: ConfigFile) -> list[str]:
    """Returns what each layer has: "full" for an indexer, "shared" for the choice of the last layer
    that has one. Source: transformers 5.24, `GlmMoeDsaConfig`."""
    count = file.num_hidden_layers
    if file.indexer_types is not None:
        said = list(file.indexer_types)
    elif (pattern := file.index_topk_pattern) is not None:
        names = {"F": "full", "S": "shared"}
        said = [names.get(name, name) for name in pattern]
    else:
        every, first = max(file.index_topk_freq, 1), file.index_skip_topk_offset
        said = ["shared" if max(i - first + 1, 0) % every else "full" for i in range(count)]
    if len(said) != count or set(said) - {"full", "shared"} or said[0] != "full":
        raise UnsupportedField("indexer_types", f"{said} for {count} layers")
    return said

"""DeepSeek-V4: windows beside rows that stand for several tokens, and several residual streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from engine.config import KVLayers, ModelConfig, ParallelConfig
from engine.models.config.config_file import ConfigFile
from engine.models.specs.ahead import AheadNames
from engine.models.specs.base import UnsupportedField
from engine.models.specs.deepseek_v4_fields import AHEAD, RENAMED, faults_of, with_common_names
from engine.models.specs.deepseek_v4_layers import CHOSEN, rates_of, ratios_of, read_experts
from engine.models.specs.dense import DenseSpec, NormNames
from engine.models.specs.experts import number_of
from engine.models.specs.indexer import IndexerSpec
from engine.models.specs.parallel_checks import check_counts
from engine.models.specs.rope import read_rotary
from engine.models.specs.token_rows import StreamsSpec, TokenRowsSpec
from engine.rope import Rotary


class DeepseekV4Spec(DenseSpec, frozen=True, kw_only=True):
    """Experts chosen by token ids in the first layers, and by roots of softplus scores and a bias
    in all others."""

    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = RENAMED
    norms: ClassVar[NormNames] = NormNames(before_attention="attn_norm", before_mlp="ffn_norm")
    default_theta: ClassVar[float] = 10_000.0
    num_dense: ClassVar[int | None] = 0
    ahead: ClassVar[AheadNames] = AHEAD
    other_weights: ClassVar[tuple[str, ...]] = ("model.mtp.",)

    rows: TokenRowsSpec
    streams: StreamsSpec
    row_rotary: Rotary

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        return with_common_names(file)

    @classmethod
    def head_dim_of(cls, file: ConfigFile) -> int:
        """Returns the size of what rotates."""
        return number_of(file, "qk_rope_head_dim")

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        return number_of(file, "sliding_window")

    @classmethod
    def read_rotary(cls, file: ConfigFile, max_model_len: int) -> Rotary:
        return Rotary(theta=file.rope_theta or cls.default_theta, dim=cls.head_dim_of(file))

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        ratios, rates, count = ratios_of(file), rates_of(file), number_of(file, "hc_mult")
        return {
            "rows": TokenRowsSpec(
                q_rank=number_of(file, "q_lora_rank"),
                head_dim=number_of(file, "head_dim"),
                groups=number_of(file, "o_groups"),
                group_rank=number_of(file, "o_lora_rank"),
                ratios=ratios,
                chosen_ratio=rates[CHOSEN],
                indexer=IndexerSpec(
                    heads=number_of(file, "index_n_heads"),
                    dim=number_of(file, "index_head_dim"),
                    top_k=number_of(file, "index_topk"),
                    interleaved=True,
                ),
            ),
            "streams": StreamsSpec(count=count, iterations=file.hc_sinkhorn_iters, eps=file.hc_eps),
            "row_rotary": read_rotary(file, cls.head_dim_of(file), max_model_len),
            "sink_layers": tuple(range(file.num_hidden_layers)),
            "experts": read_experts(file),
        }

    @property
    def rows_of_tokens(self) -> TokenRowsSpec:
        return self.rows

    @property
    def residual_streams(self) -> StreamsSpec:
        return self.streams

    def rotary_of(self, layer: int) -> Rotary:
        return self.row_rotary if self.rows.ratio_of(layer) else self.rotary

    def kv_layers(self, model: ModelConfig) -> tuple[KVLayers, ...]:
        return self.rows.kv_layers(model, self.sliding_window)

    def kv_layers_ahead(self, model: ModelConfig) -> tuple[KVLayers, ...]:
        return (self.rows.vectors(range(model.num_layers), model, window=self.sliding_window),)

    @property
    def rare_attention(self) -> str:
        return "attention to rows that stand for several tokens"

    @property
    def dense_tokens(self) -> int | None:
        rows = self.rows
        return rows.indexer.top_k * rows.chosen_ratio if rows.chosen_ratio in rows.ratios else None

    def attends_to_chosen(self, layer: int) -> bool:
        return self.rows.chooses(layer)

    def check_parallel(self, model: ModelConfig, parallel: ParallelConfig) -> None:
        super().check_parallel(model, parallel)
        check_counts(model, parallel, ((self.rows.groups, "groups of the attention's output"),))

    def _rare_facts(self, model: ModelConfig) -> tuple[Any, ...]:
        more = ("rows", self.rows), ("streams", self.streams), ("row_rotary", self.row_rotary)
        return (*super()._rare_facts(model), *more)

    @classmethod
    def _faults(cls, file: ConfigFile) -> Iterator[UnsupportedField]:
        yield from super()._faults(file)
        yield from faults_of(file)

"""Mixtral."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.specs.dense import DenseSpec
from engine.models.specs.experts import ExpertNames, ExpertSpec, num_experts_of, number_of

MIXTRAL_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


class MixtralSpec(DenseSpec, frozen=True, kw_only=True):
    """Llama with eight experts a layer, in place of the feed-forward block."""

    default_eps: ClassVar[float] = 1e-5
    default_theta: ClassVar[float] = 1_000_000.0

    @classmethod
    def read_window(cls, file: ConfigFile) -> int | None:
        super().read_window(file)
        return None if file.sliding_window is msgspec.UNSET else file.sliding_window

    @classmethod
    def read_more(cls, file: ConfigFile, max_model_len: int) -> dict[str, Any]:
        return {
            "experts": ExpertSpec(
                count=num_experts_of(file),
                top_k=number_of(file, "num_experts_per_tok"),
                intermediate_size=file.intermediate_size,
                renormalise=True,
                names=MIXTRAL_NAMES,
            )
        }

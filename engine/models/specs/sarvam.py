"""Sarvam-105B; Sarvam-30B is in `bailing`."""

from __future__ import annotations

from typing import ClassVar

from engine.models.specs.deepseek import DeepseekV3Spec


class SarvamMlaSpec(DeepseekV3Spec, frozen=True, kw_only=True):
    """Sarvam-105B: a V3 with another name for the bias that experts are chosen by."""

    num_dense: ClassVar[int | None] = 1
    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"\.gate\.expert_bias$", ".gate.e_score_correction_bias"),
    )

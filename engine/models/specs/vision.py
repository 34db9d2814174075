"""The vision tower of a checkpoint: which reader in `engine.models.specs.towers` knows it.

Of other models that take images, the text part alone is served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.images.vision_spec import VisionSpec
from engine.models.specs.base import UnsupportedField
from engine.models.specs.towers.fields import TextSizes, TowerFile
from engine.models.specs.towers.gemma4 import gemma4
from engine.models.specs.towers.gemma4_patches import gemma4_patches
from engine.models.specs.towers.glm import glm4v, glm4v_dense
from engine.models.specs.towers.kimi import moonvit
from engine.models.specs.towers.minimax import minimax_m3
from engine.models.specs.towers.muse import muse_glimmer
from engine.models.specs.towers.pixtral import pixtral
from engine.models.specs.towers.qwen import qwen2_5_vl, qwen3_5, qwen3_vl
from engine.models.specs.towers.siglip import siglip

TOWERS: dict[str, Callable[[TowerFile], VisionSpec]] = {
    "Gemma3ForConditionalGeneration": siglip,
    "Gemma4ForConditionalGeneration": gemma4,
    "Gemma4UnifiedForConditionalGeneration": gemma4_patches,
    "Glm46VForConditionalGeneration": glm4v_dense,
    "Glm4vForConditionalGeneration": glm4v_dense,
    "Glm4vMoeForConditionalGeneration": glm4v,
    "KimiK25ForConditionalGeneration": moonvit,
    "Kimi_K25ForConditionalGeneration": moonvit,
    "MiniMaxM3SparseForConditionalGeneration": minimax_m3,
    "Mistral3ForConditionalGeneration": pixtral,
    "MuseGlimmerForConditionalGeneration": muse_glimmer,
    "Qwen2_5_VLForConditionalGeneration": qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": qwen3_vl,
    "Qwen3_5ForConditionalGeneration": qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5,
}


def read_vision(
    folder: Path, architecture: str, whole: Mapping[str, Any], text: TextSizes
) -> tuple[VisionSpec | None, str]:
    """Returns the tower of a whole model; None: it has none that is here. Then what is not here of
    a tower whose kind is: the text part can be served all the same.

    Args:
        architecture: Of the whole model.
        whole: What its config.json says.
    """
    reader = TOWERS.get(architecture)
    if reader is None or "vision_config" not in whole:
        return None, ""
    try:
        return reader(TowerFile(folder, architecture, whole, text)), ""
    except UnsupportedField as refusal:
        return None, f"asks for {refusal.what} ({refusal.field}), which tandem does not have"

"""Every architecture is compared with transformers, and stands in docs/models.md, or in
docs/images.md if it sees images."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.models.config.wrappers import WRAPPERS
from engine.models.registry import MODELS
from tests.engine.images.vision_families import FAMILIES as VISION_FAMILIES
from tests.engine.models.conftest import ROOT
from tests.engine.models.reference_models import FAMILIES

PAGES = ["models.md", "images.md"]
COMPARED = {family.architecture for family in FAMILIES.values()}
COMPARED |= {family.model.__name__ for family in VISION_FAMILIES.values()}
ELSEWHERE = {
    "BailingMoeV2ForCausalLM",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "InternS1ForConditionalGeneration",
    "InternS2PreviewForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
    "MiniMaxM1ForCausalLM",
    "MiniMaxText01ForCausalLM",
    "MistralLarge3ForCausalLM",
    "MistralNativeForCausalLM",
    "Kimi_K25ForConditionalGeneration",
    "MiMoV2ForCausalLM",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
}
"""`test_wrappers`, `test_mistral_params`, `test_published_forms` and `test_cut_projections` make
these of another family's checkpoint, and compare them with it."""


@pytest.mark.parametrize("name", sorted([*MODELS, *WRAPPERS]))
def test_an_architecture_is_compared_and_described(name: str) -> None:
    assert name in COMPARED | ELSEWHERE | text_parts()
    pages = "".join(Path(ROOT / "docs" / page).read_text("utf-8") for page in PAGES)
    described = set(re.findall(r"`(\w+(?:ForCausalLM|ForConditionalGeneration))`", pages))
    assert name in described or name.replace("_K25", "K25") in described


def text_parts() -> set[str]:
    """Returns decoders that transformers has as the text part of a compared model alone."""
    return {
        text
        for name, wrapper in WRAPPERS.items()
        for text in wrapper.text.values()
        if name in COMPARED
    }

"""Maps an architecture's name to its spec and its model, in the only list. Torch-free: a model's
module is imported when a worker builds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.config import ModelConfig
from engine.models.config_file import ConfigHead
from engine.models.foreign import foreign_architecture
from engine.models.mistral_params import read_config
from engine.models.specs.afmoe import AfmoeSpec
from engine.models.specs.bailing import BailingMoeV2Spec, SarvamMoeSpec
from engine.models.specs.base import ModelSpec
from engine.models.specs.deepseek import (
    DeepseekV2Spec,
    DeepseekV3Spec,
    Glm4MoeLiteSpec,
)
from engine.models.specs.dots import Dots1Spec
from engine.models.specs.ernie import Ernie45MoeSpec, Ernie45Spec
from engine.models.specs.exaone import Exaone4Spec
from engine.models.specs.gemma import Gemma2Spec, Gemma3Spec
from engine.models.specs.glm4 import Glm4Spec
from engine.models.specs.glm4_moe import Glm4MoeSpec, SolarOpenSpec
from engine.models.specs.gpt_oss import GptOssSpec
from engine.models.specs.granite import GraniteSpec
from engine.models.specs.hunyuan import HYV3Spec
from engine.models.specs.llama import InternLM3Spec, IQuestCoderSpec, LlamaSpec, TeleChat3Spec
from engine.models.specs.minimax import MiniMaxM2Spec
from engine.models.specs.mistral import Ministral3Spec, MistralSpec
from engine.models.specs.mistral_latent import Mistral4Spec
from engine.models.specs.mistral_native import MistralLarge3Spec, MistralNativeSpec
from engine.models.specs.mixtral import MixtralSpec
from engine.models.specs.olmo import Olmo2Spec, Olmo3Spec
from engine.models.specs.phi3 import Phi3Spec
from engine.models.specs.qwen import MiMoSpec, Qwen2Spec, Qwen3Spec
from engine.models.specs.qwen_hybrid import Qwen3NextSpec, Qwen35MoeSpec, Qwen35Spec
from engine.models.specs.qwen_moe import Qwen2MoeSpec, Qwen3MoeSpec
from engine.models.specs.sarvam import SarvamMlaSpec
from engine.models.specs.seed_oss import SeedOssSpec
from engine.models.specs.smollm3 import SmolLM3Spec
from engine.models.wrappers import WRAPPERS, text_architecture


@dataclass(frozen=True, slots=True)
class Entry:
    """One architecture.

    Attributes:
        model: "module:class" of its `engine.models.base.CausalLM`.
    """

    spec: type[ModelSpec]
    model: str


_LLAMA = "engine.models.llama:LlamaForCausalLM"
MODELS: dict[str, Entry] = {
    "AfmoeForCausalLM": Entry(AfmoeSpec, _LLAMA),
    "BailingMoeV2ForCausalLM": Entry(BailingMoeV2Spec, _LLAMA),
    "DeepseekV2ForCausalLM": Entry(DeepseekV2Spec, _LLAMA),
    "DeepseekV3ForCausalLM": Entry(DeepseekV3Spec, _LLAMA),
    "Dots1ForCausalLM": Entry(Dots1Spec, _LLAMA),
    "Ernie4_5ForCausalLM": Entry(Ernie45Spec, _LLAMA),
    "Ernie4_5_MoeForCausalLM": Entry(Ernie45MoeSpec, _LLAMA),
    "Exaone4ForCausalLM": Entry(Exaone4Spec, _LLAMA),
    "Gemma2ForCausalLM": Entry(Gemma2Spec, _LLAMA),
    "Gemma3ForCausalLM": Entry(Gemma3Spec, _LLAMA),
    "Glm4ForCausalLM": Entry(Glm4Spec, _LLAMA),
    "Glm4MoeForCausalLM": Entry(Glm4MoeSpec, _LLAMA),
    "Glm4MoeLiteForCausalLM": Entry(Glm4MoeLiteSpec, _LLAMA),
    "GraniteForCausalLM": Entry(GraniteSpec, _LLAMA),
    "GptOssForCausalLM": Entry(GptOssSpec, _LLAMA),
    "HYV3ForCausalLM": Entry(HYV3Spec, _LLAMA),
    "IQuestCoderForCausalLM": Entry(IQuestCoderSpec, _LLAMA),
    "InternLM3ForCausalLM": Entry(InternLM3Spec, _LLAMA),
    "LlamaForCausalLM": Entry(LlamaSpec, _LLAMA),
    "MiMoForCausalLM": Entry(MiMoSpec, _LLAMA),
    "MiniMaxM2ForCausalLM": Entry(MiniMaxM2Spec, _LLAMA),
    "Ministral3ForCausalLM": Entry(Ministral3Spec, _LLAMA),
    "Mistral4ForCausalLM": Entry(Mistral4Spec, _LLAMA),
    "MistralForCausalLM": Entry(MistralSpec, _LLAMA),
    "MistralLarge3ForCausalLM": Entry(MistralLarge3Spec, _LLAMA),
    "MistralNativeForCausalLM": Entry(MistralNativeSpec, _LLAMA),
    "MixtralForCausalLM": Entry(MixtralSpec, _LLAMA),
    "Olmo2ForCausalLM": Entry(Olmo2Spec, _LLAMA),
    "Olmo3ForCausalLM": Entry(Olmo3Spec, _LLAMA),
    "Phi3ForCausalLM": Entry(Phi3Spec, _LLAMA),
    "Qwen2ForCausalLM": Entry(Qwen2Spec, _LLAMA),
    "Qwen2MoeForCausalLM": Entry(Qwen2MoeSpec, _LLAMA),
    "Qwen3ForCausalLM": Entry(Qwen3Spec, _LLAMA),
    "Qwen3MoeForCausalLM": Entry(Qwen3MoeSpec, _LLAMA),
    "SarvamMLAForCausalLM": Entry(SarvamMlaSpec, _LLAMA),
    "SarvamMoEForCausalLM": Entry(SarvamMoeSpec, _LLAMA),
    "SeedOssForCausalLM": Entry(SeedOssSpec, _LLAMA),
    "SolarOpenForCausalLM": Entry(SolarOpenSpec, _LLAMA),
    "SmolLM3ForCausalLM": Entry(SmolLM3Spec, _LLAMA),
    "TeleChat3ForCausalLM": Entry(TeleChat3Spec, _LLAMA),
    "Qwen3NextForCausalLM": Entry(Qwen3NextSpec, _LLAMA),
    "Qwen3_5ForCausalLM": Entry(Qwen35Spec, _LLAMA),
    "Qwen3_5MoeForCausalLM": Entry(Qwen35MoeSpec, _LLAMA),
}


def find_architecture(path: Path) -> tuple[str, str]:
    """Returns the architecture of a config.json, and that of the whole model where it is the text
    part of one, or "". Raises `CheckpointError`: it has none that is here."""
    head = read_config(path, ConfigHead)
    names = head.architectures or []
    for name in names:
        if name in MODELS:
            return name, ""
        if text := text_architecture(name, head.model_types):
            return text, name
    raise foreign_architecture(path, names, head.model_types, [*MODELS, *WRAPPERS])


def spec_of(model: ModelConfig) -> ModelSpec:
    """Returns what only the architecture reads of `model`, as an instance of its spec."""
    return msgspec.convert(model.spec, MODELS[model.architecture].spec)

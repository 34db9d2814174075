"""Maps an architecture's name to its spec, in the only list. Torch-free;
`engine.models.decoder.decoder` is what computes each of them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.config import ModelConfig
from engine.models.config.config_file import ConfigHead
from engine.models.config.foreign import foreign_architecture
from engine.models.config.mistral_params import read_config
from engine.models.config.wrappers import WRAPPERS, text_architecture
from engine.models.specs.afmoe import AfmoeSpec
from engine.models.specs.bailing import BailingMoeV2Spec, SarvamMoeSpec
from engine.models.specs.bamba import BambaSpec, FalconH1Spec
from engine.models.specs.base import ModelSpec
from engine.models.specs.beam import BeamSpec
from engine.models.specs.deepseek import (
    DeepseekV2Spec,
    DeepseekV3Spec,
    Glm4MoeLiteSpec,
)
from engine.models.specs.deepseek_sparse import DeepseekV32Spec, GlmMoeDsaSpec
from engine.models.specs.deepseek_v4 import DeepseekV4Spec
from engine.models.specs.dots import Dots1Spec
from engine.models.specs.ernie import Ernie45MoeSpec, Ernie45Spec
from engine.models.specs.exaone import Exaone4Spec
from engine.models.specs.gemma import Gemma2Spec, Gemma3Spec
from engine.models.specs.gemma3n import Gemma3nSpec
from engine.models.specs.gemma4 import Gemma4Spec
from engine.models.specs.glm4 import Glm4Spec, Glm4vSpec
from engine.models.specs.glm4_moe import Glm4MoeSpec, SolarOpenSpec
from engine.models.specs.gpt_oss import GptOssSpec
from engine.models.specs.granite import GraniteHybridSpec, GraniteSpec
from engine.models.specs.hunyuan import HYV3Spec
from engine.models.specs.kimi_k3 import KimiK3Spec
from engine.models.specs.kimi_linear import KimiLinearSpec
from engine.models.specs.laguna import LagunaSpec
from engine.models.specs.lfm import Lfm2MoeSpec, Lfm2Spec
from engine.models.specs.lfm3 import Lfm3Spec
from engine.models.specs.ling import BailingMoeV3Spec
from engine.models.specs.llama import InternLM3Spec, IQuestCoderSpec, LlamaSpec, TeleChat3Spec
from engine.models.specs.mimo import MiMoV2Spec, MiMoV25Spec
from engine.models.specs.minimax import MiniMaxM2Spec
from engine.models.specs.minimax_sparse import MiniMaxM3Spec
from engine.models.specs.minimax_text import MiniMaxText01Spec
from engine.models.specs.mistral import Ministral3Spec, MistralSpec
from engine.models.specs.mistral_latent import Mistral4Spec
from engine.models.specs.mistral_native import MistralLarge3Spec, MistralNativeSpec
from engine.models.specs.mixtral import MixtralSpec
from engine.models.specs.muse import MuseGlimmerSpec
from engine.models.specs.nemotron import NemotronHSpec
from engine.models.specs.olmo import Olmo2Spec, Olmo3Spec
from engine.models.specs.olmo_hybrid import OlmoHybridSpec
from engine.models.specs.phi3 import Phi3Spec
from engine.models.specs.qwen import MiMoSpec, Qwen2Spec, Qwen3Spec
from engine.models.specs.qwen_hybrid import Qwen3NextSpec, Qwen35MoeSpec, Qwen35Spec
from engine.models.specs.qwen_moe import Qwen2MoeSpec, Qwen3MoeSpec
from engine.models.specs.ring import BailingMoeLinearV2Spec, BailingMoeV25Spec
from engine.models.specs.sarvam import SarvamMlaSpec
from engine.models.specs.seed_oss import SeedOssSpec
from engine.models.specs.smollm3 import SmolLM3Spec
from engine.models.specs.step import StepSpec

MODELS: dict[str, type[ModelSpec]] = {
    "AfmoeForCausalLM": AfmoeSpec,
    "BailingHybridForCausalLM": BailingMoeV3Spec,
    "BailingMoeLinearV2ForCausalLM": BailingMoeLinearV2Spec,
    "BailingMoeV2ForCausalLM": BailingMoeV2Spec,
    "BailingMoeV2_5ForCausalLM": BailingMoeV25Spec,
    "BailingMoeV3ForCausalLM": BailingMoeV3Spec,
    "BambaForCausalLM": BambaSpec,
    "BeamForCausalLM": BeamSpec,
    "DeepseekV2ForCausalLM": DeepseekV2Spec,
    "DeepseekV3ForCausalLM": DeepseekV3Spec,
    "DeepseekV32ForCausalLM": DeepseekV32Spec,
    "DeepseekV4ForCausalLM": DeepseekV4Spec,
    "Dots1ForCausalLM": Dots1Spec,
    "Ernie4_5ForCausalLM": Ernie45Spec,
    "Ernie4_5_MoeForCausalLM": Ernie45MoeSpec,
    "Exaone4ForCausalLM": Exaone4Spec,
    "FalconH1ForCausalLM": FalconH1Spec,
    "Gemma2ForCausalLM": Gemma2Spec,
    "Gemma3ForCausalLM": Gemma3Spec,
    "Gemma3nForCausalLM": Gemma3nSpec,
    "Gemma4ForCausalLM": Gemma4Spec,
    "Glm4ForCausalLM": Glm4Spec,
    "Glm4vForCausalLM": Glm4vSpec,
    "Glm4MoeForCausalLM": Glm4MoeSpec,
    "Glm4MoeLiteForCausalLM": Glm4MoeLiteSpec,
    "GlmMoeDsaForCausalLM": GlmMoeDsaSpec,
    "GraniteForCausalLM": GraniteSpec,
    "GraniteMoeHybridForCausalLM": GraniteHybridSpec,
    "GptOssForCausalLM": GptOssSpec,
    "HYV3ForCausalLM": HYV3Spec,
    "IQuestCoderForCausalLM": IQuestCoderSpec,
    "InternLM3ForCausalLM": InternLM3Spec,
    "KimiK3ForCausalLM": KimiK3Spec,
    "KimiLinearForCausalLM": KimiLinearSpec,
    "LagunaForCausalLM": LagunaSpec,
    "Lfm2ForCausalLM": Lfm2Spec,
    "Lfm2MoeForCausalLM": Lfm2MoeSpec,
    "Lfm3ForCausalLM": Lfm3Spec,
    "LlamaForCausalLM": LlamaSpec,
    "MiMoForCausalLM": MiMoSpec,
    "MiMoV2FlashForCausalLM": MiMoV2Spec,
    "MiMoV2ForCausalLM": MiMoV25Spec,
    "MiniMaxForCausalLM": MiniMaxText01Spec,
    "MiniMaxM1ForCausalLM": MiniMaxText01Spec,
    "MiniMaxM2ForCausalLM": MiniMaxM2Spec,
    "MiniMaxM3VLForCausalLM": MiniMaxM3Spec,
    "MiniMaxText01ForCausalLM": MiniMaxText01Spec,
    "Ministral3ForCausalLM": Ministral3Spec,
    "Mistral4ForCausalLM": Mistral4Spec,
    "MistralForCausalLM": MistralSpec,
    "MistralLarge3ForCausalLM": MistralLarge3Spec,
    "MistralNativeForCausalLM": MistralNativeSpec,
    "MixtralForCausalLM": MixtralSpec,
    "MuseGlimmerForCausalLM": MuseGlimmerSpec,
    "NemotronHForCausalLM": NemotronHSpec,
    "Olmo2ForCausalLM": Olmo2Spec,
    "Olmo3ForCausalLM": Olmo3Spec,
    "OlmoHybridForCausalLM": OlmoHybridSpec,
    "Phi3ForCausalLM": Phi3Spec,
    "Qwen2ForCausalLM": Qwen2Spec,
    "Qwen2MoeForCausalLM": Qwen2MoeSpec,
    "Qwen3ForCausalLM": Qwen3Spec,
    "Qwen3MoeForCausalLM": Qwen3MoeSpec,
    "SarvamMLAForCausalLM": SarvamMlaSpec,
    "SarvamMoEForCausalLM": SarvamMoeSpec,
    "SeedOssForCausalLM": SeedOssSpec,
    "SolarOpenForCausalLM": SolarOpenSpec,
    "SmolLM3ForCausalLM": SmolLM3Spec,
    "Step3p5ForCausalLM": StepSpec,
    "TeleChat3ForCausalLM": TeleChat3Spec,
    "Qwen3NextForCausalLM": Qwen3NextSpec,
    "Qwen3_5ForCausalLM": Qwen35Spec,
    "Qwen3_5MoeForCausalLM": Qwen35MoeSpec,
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
    return msgspec.convert(model.spec, MODELS[model.architecture])

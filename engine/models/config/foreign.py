"""Says of an architecture that is not here which one is nearest, and in what they differ."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from engine.models.errors import CheckpointError

_MAMBA = "layers with a Mamba state"
_MAMBA2 = "layers with a Mamba2 state"
_ENCODER = "it encodes its input and has no decoder alone"
_LLAMA, _DEEPSEEK = "LlamaForCausalLM", "DeepseekV3ForCausalLM"
_KIMI = "KimiLinearForCausalLM"
_PARALLEL = "attention and feed-forward block side by side, and norms that subtract the mean"
_OLD_DECODER = "learned or other positions, norms that subtract the mean, and no gate"
DIFFERENCES = {
    "apertus": (_LLAMA, "a feed-forward block without a gate (xIELU)"),
    "arcee": (_LLAMA, "a feed-forward block without a gate (squared ReLU)"),
    "bailing_moe": ("BailingMoeV2ForCausalLM", "softmax scores of experts"),
    "bert": ("", _ENCODER),
    "bloom": (_LLAMA, _OLD_DECODER),
    "cohere": (_LLAMA, _PARALLEL),
    "cohere2": (_LLAMA, _PARALLEL),
    "cohere2_moe": ("Qwen3MoeForCausalLM", _PARALLEL),
    "dbrx": ("MixtralForCausalLM", "norms that subtract the mean, and experts as one tensor"),
    "deepseek_v41": (
        "DeepseekV4ForCausalLM",
        "an n-gram memory (engram), rows of one token or two in FP4 that later layers share, an "
        "index of two levels (blocks, and rows in these), residual streams whose mix is made one "
        "block ahead, weights in FP8 blocks of 32 x 32, and DSpark's drafter",
    ),
    "dots3_note": (
        "Dots1ForCausalLM",
        "windows, and an indexer that chooses which tokens are attended",
    ),
    "exaone": (_LLAMA, "other names of its settings and tensors"),
    "exaone_moe": ("Exaone4ForCausalLM", "experts"),
    "falcon": (_LLAMA, _PARALLEL),
    "flex_olmo": ("Olmo2ForCausalLM", "experts"),
    "gemma": ("Gemma2ForCausalLM", "no norms behind the blocks, and no bound of scores"),
    "gemma3n": ("Gemma3ForCausalLM", "embeddings of each layer, and layers that share keys"),
    "glm": ("Glm4ForCausalLM", "no norms behind the blocks"),
    "glm5_next": (_KIMI, "an indexer of pooled keys, several residual streams"),
    "gpt2": (_LLAMA, _OLD_DECODER),
    "gpt_bigcode": (_LLAMA, _OLD_DECODER),
    "gpt_neox": (_LLAMA, _PARALLEL),
    "granitemoe": ("GraniteForCausalLM", "experts as one tensor"),
    "helium": (_LLAMA, "interleaved pairs"),
    "hunyuan_v1_dense": ("Qwen3ForCausalLM", "norms of heads behind the rotation"),
    "hunyuan_v1_moe": ("Qwen3MoeForCausalLM", "norms of heads behind the rotation"),
    "hy_v4": (_DEEPSEEK, "an indexer, sinks, and several residual streams"),
    "internvl_chat": (
        "InternVLForConditionalGeneration",
        "use the -HF release",
    ),
    "jamba": ("MixtralForCausalLM", _MAMBA),
    "llama4": (
        _LLAMA,
        "attention within chunks, and experts whose input is weighted in place of their output",
    ),
    "longcat_flash": (_DEEPSEEK, "two blocks of attention a layer, and experts that do nothing"),
    "mamba": (_LLAMA, _MAMBA),
    "mamba2": (_LLAMA, _MAMBA2),
    "mllama": (_LLAMA, "layers that attend to an image"),
    "nanochat": (_LLAMA, "norms without weights, and no gate"),
    "nemotron": (_LLAMA, "norms that subtract the mean, and no gate"),
    "olmo": ("Olmo2ForCausalLM", "norms without weights, in front of the blocks"),
    "olmoe": ("Olmo2ForCausalLM", "experts, and norms in front of the blocks"),
    "opt": (_LLAMA, _OLD_DECODER),
    "phi": ("Phi3ForCausalLM", _PARALLEL),
    "phimoe": ("MixtralForCausalLM", "norms that subtract the mean, and experts chosen one by one"),
    "qwen2_vl": ("Qwen2_5_VLForConditionalGeneration", "a tower of another kind"),
    "stablelm": (_LLAMA, "norms that subtract the mean"),
    "starcoder2": ("MistralForCausalLM", "norms that subtract the mean, and no gate"),
    "step3_text": ("Qwen3MoeForCausalLM", "queries from a latent that all heads share"),
    "t5": ("", _ENCODER),
    "vaultgemma": ("Gemma2ForCausalLM", "no norms behind the blocks"),
    "whisper": ("", _ENCODER),
}
"""Maps `model_type` to the nearest architecture, or to "", and to what it has besides."""
_KIND_OF_HEAD = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|Model)$")


def foreign_architecture(
    path: Path, names: Sequence[str], model_types: Sequence[str], known: Collection[str]
) -> CheckpointError:
    """Returns the refusal of a config.json at `path`.

    Args:
        names: Its `architectures`.
        model_types: Its `model_type`, and that of the text part of a model with several.
        known: All architectures that are here.
    """
    named = ", ".join(names) or "none"
    if not names and model_types:
        named += f" (model_type {model_types[0]})"
    fault = f"names architecture {named}, which tandem does not have"
    nearest, difference = _nearest(names, model_types, known)
    if nearest:
        fault += f"; the nearest that it has is {nearest}"
    if difference:
        fault += f" (what differs: {difference})"
    return CheckpointError(path, fault, f"use a checkpoint of one of {', '.join(sorted(known))}")


def _nearest(
    names: Sequence[str], model_types: Sequence[str], known: Collection[str]
) -> tuple[str, str]:
    """Returns the nearest architecture and the difference, as far as they are known: names that
    are spelled alike say nothing."""
    for model_type in model_types:
        for kind in (model_type, model_type.removesuffix("_text")):
            if kind in DIFFERENCES:
                return DIFFERENCES[kind]
    stems = {_stem(name): name for name in sorted(known)}
    for name in (*names, *model_types):
        if found := stems.get(_stem(name)):
            return found, ""
    return "", ""


def _stem(name: str) -> str:
    """Returns what is particular in a name: `qwen3moe` of `Qwen3MoeForCausalLM` and `qwen3_moe`."""
    return _KIND_OF_HEAD.sub("", name).replace("_", "").lower()

"""Says of an architecture that is not here which one is nearest, and in what they differ."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from engine.models.errors import CheckpointError

_STATE_SPACE = "layers with a recurrent state"
_ENCODER = "it encodes its input and has no decoder alone"
_LLAMA, _DEEPSEEK = "LlamaForCausalLM", "DeepseekV3ForCausalLM"
_PARALLEL = "attention and feed-forward block side by side, and norms that subtract the mean"
_OLD_DECODER = "learned or other positions, norms that subtract the mean, and no gate"
DIFFERENCES = {
    "bamba": (_LLAMA, _STATE_SPACE),
    "bert": ("", _ENCODER),
    "bloom": (_LLAMA, _OLD_DECODER),
    "cohere": (_LLAMA, _PARALLEL),
    "cohere2": (_LLAMA, _PARALLEL),
    "dbrx": ("MixtralForCausalLM", "norms that subtract the mean, and experts as one tensor"),
    "deepseek_v32": (_DEEPSEEK, "an indexer that chooses which tokens are attended"),
    "deepseek_v4": (_DEEPSEEK, "compressed sparse attention and several residual streams"),
    "falcon": (_LLAMA, _PARALLEL),
    "falcon_h1": (_LLAMA, _STATE_SPACE),
    "gemma3n": ("Gemma3ForCausalLM", "embeddings of each layer, and layers that share keys"),
    "gemma4": ("Gemma3ForCausalLM", "heads of two sizes, and layers that share keys"),
    "glm_moe_dsa": (_DEEPSEEK, "an indexer that chooses which tokens are attended"),
    "gpt2": (_LLAMA, _OLD_DECODER),
    "gpt_bigcode": (_LLAMA, _OLD_DECODER),
    "gpt_neox": (_LLAMA, _PARALLEL),
    "granitemoehybrid": (_LLAMA, _STATE_SPACE),
    "jamba": ("MixtralForCausalLM", _STATE_SPACE),
    "kimi_linear": (_DEEPSEEK, _STATE_SPACE),
    "lfm2": (_LLAMA, "convolutions in place of attention"),
    "llama4": (
        _LLAMA,
        "attention within chunks, and experts whose input is weighted in place of their output",
    ),
    "mamba": (_LLAMA, _STATE_SPACE),
    "mamba2": (_LLAMA, _STATE_SPACE),
    "minimax": ("MiniMaxM2ForCausalLM", _STATE_SPACE),
    "mistral4": (_DEEPSEEK, "scores that grow with the position"),
    "mllama": (_LLAMA, "layers that attend to an image"),
    "nemotron": (_LLAMA, "norms that subtract the mean, and no gate"),
    "nemotron_h": (_LLAMA, _STATE_SPACE),
    "opt": (_LLAMA, _OLD_DECODER),
    "phi": ("Phi3ForCausalLM", _PARALLEL),
    "starcoder2": ("MistralForCausalLM", "norms that subtract the mean, and no gate"),
    "t5": ("", _ENCODER),
    "whisper": ("", _ENCODER),
}
"""Maps `model_type` to the nearest architecture, or to "", and to what it has besides."""
_KIND_OF_HEAD = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|Model)$")
_LEAST_LIKENESS = 0.5


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
    """Returns the nearest architecture and the difference, as far as they are known."""
    for model_type in model_types:
        for kind in (model_type, model_type.removesuffix("_text")):
            if kind in DIFFERENCES:
                return DIFFERENCES[kind]
    stems = {_stem(name): name for name in sorted(known)}
    for name in (*names, *model_types):
        if found := difflib.get_close_matches(_stem(name), stems, 1, _LEAST_LIKENESS):
            return stems[found[0]], ""
    return "", ""


def _stem(name: str) -> str:
    """Returns what is particular in a name: `qwen3moe` of `Qwen3MoeForCausalLM` and `qwen3_moe`."""
    return _KIND_OF_HEAD.sub("", name).replace("_", "").lower()

"""Layers that predict ahead of models most of whose layers keep a state, in the forms in which Ling
and Nemotron have them, and what they draft by transformers' own layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.engine.models.reference_models import FAMILIES, reference, save_checkpoint
from tests.engine.worker.drafts.draft_checkpoints import HIDDEN, Reference, noise

_PARTS = {"enorm": (HIDDEN,), "hnorm": (HIDDEN,), "eh_proj": (HIDDEN, 2 * HIDDEN)}
_WHOLE_NEMOTRON = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"]


def write_ling(folder: Path, family: str) -> None:
    """Writes a model with one layer more, with latents, and beside it one where that is an ordinary
    layer."""
    known = FAMILIES[family]
    count = known.changes["num_hidden_layers"]
    kinds = [*known.changes["layer_types"], "full_attention"]
    more = {**known.changes, "num_hidden_layers": count + 1, "layer_types": kinds}
    for path in (folder, folder.with_name("whole")):
        save_checkpoint(replace(known, changes=more), path)
    fewer = {"num_hidden_layers": count, "layer_types": kinds[:-1], "mlp_layer_types": None}
    _finish(folder, f"model.layers.{count}.", f"model.layers.{count}.final_layernorm", fewer)


def write_nemotron(folder: Path) -> None:
    """Writes a model with two layers more, attention and experts, and beside it one where those are
    ordinary layers."""
    known, count = FAMILIES["nemotron_h"], len(_WHOLE_NEMOTRON)
    kinds = [*_WHOLE_NEMOTRON, "full_attention", "moe"]
    for path in (folder, folder.with_name("whole")):
        save_checkpoint(replace(known, changes=known.changes | {"layers_block_type": kinds}), path)
    fewer = {"layers_block_type": kinds[:-2], "mtp_layers_block_type": kinds[-2:]}
    fewer |= {"num_hidden_layers": count, "num_nextn_predict_layers": 1}
    path = folder / "model.safetensors"
    weights = load_file(path)
    for place in range(2):
        last = f".layers.{count + place}."
        for name in [name for name in weights if last in name]:
            weights[f"mtp.layers.{place}.{name.partition(last)[2]}"] = weights.pop(name)
    save_file(weights, path, metadata={"format": "pt"})
    _finish(folder, "mtp.layers.0.", "mtp.layers.1.final_layernorm", fewer)


def _finish(folder: Path, prefix: str, norm: str, config: dict[str, object]) -> None:
    """Adds what makes a layer's input, and the norm behind it."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    weights = load_file(folder / "model.safetensors")
    for seed, (name, shape) in enumerate(_PARTS.items()):
        weights[f"{prefix}{name}.weight"] = noise(*shape, seed=60 + seed)
    weights[f"{norm}.weight"] = noise(HIDDEN, seed=70)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def reference_of(prefix: str, norm: str, count: int) -> Callable[..., Reference]:
    """Returns what makes a reference: the layers behind the last, `count` in transformers' numbers,
    whose normed output is the feature of the next draft."""

    def make(target: PreTrainedModel, folder: Path) -> Reference:
        weights = load_file(folder / "model.safetensors")
        whole = reference(folder.with_name("whole"))
        whole.model.layers = whole.model.layers[-count:]
        for index, layer in enumerate(whole.model.layers):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    module.layer_idx = index
        _cut(whole, count)
        eps = float(
            getattr(target.config, "rms_norm_eps", None) or target.config.layer_norm_epsilon
        )

        def normed(x: Tensor, name: str) -> Tensor:
            return F.rms_norm(x, (HIDDEN,), weights[f"{name}.weight"], eps)

        def forward(embedded: Tensor, before: Tensor) -> Tensor:
            parts = normed(embedded, f"{prefix}enorm"), normed(before, f"{prefix}hnorm")
            x = F.linear(torch.cat(parts, -1), weights[f"{prefix}eh_proj.weight"])
            x = torch.cat([torch.zeros_like(x[:1]), x[1:]])
            out = whole.model(inputs_embeds=x.unsqueeze(0), use_cache=False).last_hidden_state[0]
            return normed(out, norm)

        return Reference(target, lambda streams: streams[-1], forward, target.lm_head)

    return make


def _cut(whole: PreTrainedModel, count: int) -> None:
    """Makes a model of its last layers alone, without the norm behind them."""
    config = whole.config
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        if isinstance(kinds := getattr(config, name, None), list):
            setattr(config, name, kinds[-count:])
    config.num_hidden_layers = count
    norm = "norm" if hasattr(whole.model, "norm") else "norm_f"
    setattr(whole.model, norm, nn.Identity())

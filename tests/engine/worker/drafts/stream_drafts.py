"""DeepSeek-V4's layer that predicts ahead, as it is published, and what it drafts by plain torch
and transformers' blocks of the family; transformers leaves the layer itself aside.

Source: DeepSeek-V4's inference code, 2026 (`MTPBlock`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.engine.models.family import Family
from tests.engine.models.reference_models import reference, save_checkpoint
from tests.engine.worker.drafts.draft_checkpoints import HIDDEN, Reference, noise

NORMS = "enorm", "hnorm", "norm"


def write_v4_with_mtp(folder: Path, family: Family) -> None:
    """Writes a model with one more layer, a window, that predicts ahead, and beside it one where
    that is an ordinary layer."""
    changes, count = family.changes, family.changes["num_hidden_layers"]
    kinds = [*changes["layer_types"], "sliding_attention"]
    more = replace(
        family, changes={**changes, "num_hidden_layers": count + 1, "layer_types": kinds}
    )
    for path in (folder, folder.with_name("whole")):
        save_checkpoint(more, path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": count, "num_nextn_predict_layers": 1}
    for name in {"layer_types", "mlp_layer_types"} & config.keys():
        config[name] = config[name][:count]
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    prefix = next(name for name in stored if f"layers.{count}.attn" in name).partition(".attn")[0]
    weights = {name.replace(f"{prefix}.", "mtp.0."): tensor for name, tensor in stored.items()}
    streams = config["hc_mult"]
    for index, name in enumerate(NORMS):
        weights[f"mtp.0.{name}.weight"] = noise(HIDDEN, seed=60 + index)
    for index, name in enumerate(("e_proj", "h_proj")):
        weights[f"mtp.0.{name}.weight"] = noise(HIDDEN, HIDDEN, seed=70 + index)
    for index, shape in enumerate(((streams, streams * HIDDEN), (streams,), (1,))):
        own = ("fn", "base", "scale")[index]
        weights[f"mtp.0.hc_head_{own}"] = noise(*shape, seed=80 + index)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def v4_mtp_reference(target: PreTrainedModel, folder: Path) -> Reference:
    weights = load_file(folder / "model.safetensors")
    config, made = target.config, dict[str, Tensor]()
    whole = reference(folder.with_name("whole")).model
    block, count, eps = whole.layers[-1], config.hc_mult, config.rms_norm_eps

    def after_last(module: Any, given: Any, streams: Tensor) -> None:
        made["streams"] = streams[0].flatten(1)

    target.model.layers[-1].register_forward_hook(after_last)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), weights[f"mtp.0.{name}.weight"], eps)

    def forward(embedded: Tensor, before: Tensor) -> Tensor:
        streams = before.unflatten(1, (count, HIDDEN))
        x = F.linear(norm(streams, "hnorm"), weights["mtp.0.h_proj.weight"])
        x = x + F.linear(norm(embedded, "enorm"), weights["mtp.0.e_proj.weight"]).unsqueeze(1)
        x[0] = 0.0
        places = torch.arange(len(x))
        distance = places[:, None] - places
        unseen = (distance < 0) | (distance >= config.sliding_window)
        mask = torch.zeros(len(x), len(x)).masked_fill(unseen, float("-inf"))
        turn = whole.rotary_emb(embedded[None], position_ids=places[None], layer_type="main")
        out: Tensor = block(
            x[None],
            position_embeddings={"main": turn},
            position_ids=places[None],
            attention_mask=mask[None, None],
        )
        return out[0].flatten(1)

    def logits(out: Tensor) -> Tensor:
        fn, base, scale = (weights[f"mtp.0.hc_head_{name}"] for name in ("fn", "base", "scale"))
        mixes = F.linear(F.rms_norm(out, out.shape[1:], None, eps), fn)
        parts = torch.sigmoid(mixes * scale + base) + config.hc_eps
        row = (parts.unsqueeze(-1) * out.unflatten(1, (count, HIDDEN))).sum(1)
        found: Tensor = target.lm_head(norm(row, "norm"))
        return found

    return Reference(target, lambda streams: made["streams"], forward, logits)

"""Tiny drafters in the forms in which they are published, and what they draft by plain torch.

The references know no cache: they compute all tokens anew for every draft, by transformers' own
layers where there are any.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.engine.models.family import SIZES
from tests.engine.models.reference_models import FAMILIES, reference, save_checkpoint

HIDDEN, VOCAB = SIZES["hidden_size"], SIZES["vocab_size"]
NUM_LAYERS = SIZES["num_hidden_layers"]
DRAFT_VOCAB = 48
TAPS = (0, 1, 2)
NUM_HEADS = 3
_EPS = 1e-6

Weights = dict[str, Tensor]
Layer = Callable[[Tensor, Tensor], Tensor]
"""Takes embeddings and features, [n, H] each, and returns what the next token takes."""
Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Reference:
    """Drafts greedily. `features` takes what transformers calls hidden states: the stream in front
    of each layer, and the output behind the last norm. `behind`: layers and logits of the drafts
    behind the first one, which read what the layer before has made of the token before; the last
    of all reads its own outputs from there on."""

    target: PreTrainedModel
    features: Callable[[list[Tensor]], Tensor]
    layer: Layer
    logits: Logits
    behind: tuple[tuple[Layer, Logits], ...] = ()
    begin: Callable[[], None] = lambda: None

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Returns `count` tokens that are guessed to follow `tokens`."""
        self.begin()
        streams = self.target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        feature = self.features([stream[0] for stream in streams])
        known, chain = list(tokens), ((self.layer, self.logits), *self.behind)
        for index in range(count):
            layer, logits = chain[min(index, len(chain) - 1)]
            if index < len(chain):
                before = torch.cat([torch.zeros(1, feature.shape[1]), feature])
            else:
                before = torch.cat([before, feature[-1:]])
            embedded = self.target.get_input_embeddings()(torch.tensor(known))
            feature = layer(embedded, before)
            known.append(int(logits(feature[-1:])[0].argmax()))
        return known[len(tokens) :]


def noise(*shape: int, seed: int) -> Tensor:
    """Returns weights large enough that every part of a head matters."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return 1.0 + 0.2 * drawn if len(shape) == 1 else 0.15 * drawn


def _write(folder: Path, weights: Weights, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def _layer_weights(prefix: str, inputs: int) -> Weights:
    kv = HIDDEN // SIZES["num_attention_heads"] * SIZES["num_key_value_heads"]
    middle = SIZES["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (HIDDEN, inputs),
        "self_attn.k_proj": (kv, inputs),
        "self_attn.v_proj": (kv, inputs),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (middle, HIDDEN),
        "mlp.up_proj": (middle, HIDDEN),
        "mlp.down_proj": (HIDDEN, middle),
        "post_attention_layernorm": (HIDDEN,),
    }
    return {
        f"{prefix}.{name}.weight": noise(*shape, seed=40 + index)
        for index, (name, shape) in enumerate(shapes.items())
    }


def _head_config(**more: Any) -> dict[str, Any]:
    return {
        **SIZES,
        "num_hidden_layers": 1,
        "rms_norm_eps": _EPS,
        "max_position_embeddings": 64,
        "architectures": ["LlamaForCausalLM"],
        **more,
    }


def _without_first(x: Tensor, count: int = 1) -> Tensor:
    return torch.cat([torch.zeros_like(x[:count]), x[count:]])


def _bare_layer(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Returns what the only layer of a model makes of inputs [n, H], without the last norm."""
    model.model.norm = nn.Identity()
    return lambda x: model.model(inputs_embeds=x.unsqueeze(0)).last_hidden_state[0]


# EAGLE ----------------------------------------------------------------------------------------


def write_eagle(folder: Path) -> None:
    weights = _layer_weights("layers.0", HIDDEN)
    weights |= {"fc.weight": noise(HIDDEN, 2 * HIDDEN, seed=1), "fc.bias": noise(HIDDEN, seed=2)}
    weights["embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
    _write(folder, weights, _head_config())


def eagle_reference(target: PreTrainedModel, folder: Path) -> Reference:
    weights = load_file(folder / "model.safetensors")
    config = LlamaConfig(**_head_config(max_position_embeddings=512), attn_implementation="eager")
    model = LlamaForCausalLM(config).eval()
    own = {f"model.{name}": tensor for name, tensor in weights.items() if "layers." in name}
    model.load_state_dict(own, strict=False)
    model.model.layers[0].input_layernorm = nn.Identity()
    layer = _bare_layer(model)

    def forward(embedded: Tensor, before: Tensor) -> Tensor:
        x = F.linear(torch.cat([embedded, before], -1), weights["fc.weight"], weights["fc.bias"])
        return layer(_without_first(x))

    return Reference(target, lambda streams: streams[-1], forward, target.lm_head)


# EAGLE-3 --------------------------------------------------------------------------------------


def write_eagle3(folder: Path, *, speculators: bool = False, is_newer: bool = False) -> None:
    """Writes SafeAILab's form, or that of speculators; the newer one with all that Eagle 3.1 and
    speculators 0.9 have besides: norms of heads and in front of `fc`, and a normed output."""
    prefix = "layers.0" if speculators else "midlayer"
    kept = torch.arange(DRAFT_VOCAB) * 2 + 1
    weights = _layer_weights(prefix, 2 * HIDDEN)
    for index, name in enumerate((f"{prefix}.input_layernorm", f"{prefix}.hidden_norm", "norm")):
        weights[f"{name}.weight"] = noise(HIDDEN, seed=20 + index)
    weights |= {
        "fc.weight": noise(HIDDEN, len(TAPS) * HIDDEN, seed=1),
        "lm_head.weight": noise(DRAFT_VOCAB, HIDDEN, seed=2),
        "d2t": kept - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True),
    }
    if is_newer:
        head_dim = HIDDEN // SIZES["num_attention_heads"]
        shapes = {"input_norm": len(TAPS) * HIDDEN} | {f"fc_norm.{i}": HIDDEN for i in range(3)}
        shapes |= {f"{prefix}.self_attn.{name}_norm": head_dim for name in "qk"}
        for index, (name, size) in enumerate(shapes.items()):
            weights[f"{name}.weight"] = noise(size, seed=60 + index)
    config = _head_config(draft_vocab_size=DRAFT_VOCAB)
    field = "eagle_aux_hidden_state_layer_ids"
    if speculators:
        own = {"draft_vocab_size": DRAFT_VOCAB, field: list(TAPS), "norm_before_residual": True}
        if is_newer:
            own |= dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output"), True)
            config |= {"model_type": "qwen3", "head_dim": head_dim}
        config = {**own, "transformer_layer_config": config}
    else:
        config |= {"eagle_config": {field: [layer - 1 for layer in TAPS]}}
    _write(folder, weights, config)


def eagle3_reference(target: PreTrainedModel, folder: Path) -> Reference:
    weights = load_file(folder / "model.safetensors")
    is_speculators = "layers.0.hidden_norm.weight" in weights
    prefix = "layers.0" if is_speculators else "midlayer"
    is_newer = "input_norm.weight" in weights

    def w(name: str) -> Tensor:
        return weights[f"{prefix}.{name}.weight"]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), weight, _EPS)

    def rotate(x: Tensor) -> Tensor:
        head = x.shape[-1]
        angles = torch.outer(
            torch.arange(len(x)).float(), 10_000.0 ** (-torch.arange(0, head, 2) / head)
        ).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def attend(x: Tensor) -> Tensor:
        num, num_kv = SIZES["num_attention_heads"], SIZES["num_key_value_heads"]
        q, k, v = (
            F.linear(x, w(f"self_attn.{name}_proj")).view(len(x), count, HIDDEN // num)
            for name, count in (("q", num), ("k", num_kv), ("v", num_kv))
        )
        if is_newer:
            q, k = (
                F.rms_norm(x, x.shape[-1:], w(f"self_attn.{name}_norm"), _EPS)
                for x, name in ((q, "q"), (k, "k"))
            )
        q, k = rotate(q), rotate(k)
        k, v = (part.repeat_interleave(num // num_kv, dim=1) for part in (k, v))
        found = F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
        )
        return F.linear(found.transpose(0, 1).flatten(1), w("self_attn.o_proj"))

    def forward(embedded: Tensor, before: Tensor) -> Tensor:
        normed = norm(before, w("hidden_norm"))
        x = torch.cat([norm(embedded, w("input_layernorm")), normed], -1)
        stream = (normed if is_speculators else before) + attend(_without_first(x))
        y = norm(stream, w("post_attention_layernorm"))
        gated = F.silu(F.linear(y, w("mlp.gate_proj"))) * F.linear(y, w("mlp.up_proj"))
        out = stream + F.linear(gated, w("mlp.down_proj"))
        return norm(out, weights["norm.weight"]) if is_newer else out

    def logits(out: Tensor) -> Tensor:
        normed = out if is_newer else norm(out, weights["norm.weight"])
        own = F.linear(normed, weights["lm_head.weight"])
        whole = torch.full((len(out), VOCAB), float("-inf"))
        whole[:, weights["t2d"].nonzero().flatten()] = own
        return whole

    def features(streams: list[Tensor]) -> Tensor:
        x = torch.cat([streams[i] for i in TAPS], -1)
        if is_newer:
            x = F.rms_norm(x, x.shape[-1:], weights["input_norm.weight"], _EPS)
            parts = enumerate(x.chunk(len(TAPS), -1))
            x = torch.cat([norm(part, weights[f"fc_norm.{i}.weight"]) for i, part in parts], -1)
        return F.linear(x, weights["fc.weight"])

    return Reference(target, features, forward, logits)


# Medusa ---------------------------------------------------------------------------------------


def write_medusa(folder: Path) -> None:
    weights = {}
    for head in range(NUM_HEADS):
        for layer in range(2):
            name = f"medusa_heads.blocks.{head}.layers.{layer}"
            weights[f"{name}.weight"] = noise(HIDDEN, HIDDEN, seed=10 * head + layer)
            weights[f"{name}.bias"] = noise(HIDDEN, seed=10 * head + layer + 5)
        weights[f"medusa_heads.lm_heads.{head}.weight"] = noise(VOCAB, HIDDEN, seed=90 + head)
    config = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": NUM_HEADS}
    _write(folder, weights, {**config, "num_hidden_layers": 2, "model_type": "medusa"})


@dataclass(frozen=True)
class MedusaReference:
    target: PreTrainedModel
    weights: Weights

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        streams = self.target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        found = []
        for head in range(count):
            x = streams[-1][0, -1]
            for layer in range(2):
                name = f"medusa_heads.blocks.{head}.layers.{layer}"
                w, bias = (self.weights[f"{name}.{kind}"] for kind in ("weight", "bias"))
                x = x + F.silu(F.linear(x, w, bias))
            found.append(int((self.weights[f"medusa_heads.lm_heads.{head}.weight"] @ x).argmax()))
        return found


def medusa_reference(target: PreTrainedModel, folder: Path) -> MedusaReference:
    return MedusaReference(target, load_file(folder / "model.safetensors"))


# Multi-token prediction -----------------------------------------------------------------------


def write_with_mtp(folder: Path, family: str, count: int = 1) -> None:
    """Writes a model of `NUM_LAYERS` layers whose next `count` predict ahead, and beside it one
    where those are ordinary layers."""
    known = FAMILIES[family]
    more = replace(known, changes={**known.changes, "num_hidden_layers": NUM_LAYERS + count})
    save_checkpoint(more, folder)
    save_checkpoint(more, folder.with_name("whole"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": count}
    for name in {"layer_types", "mlp_layer_types", "indexer_types"} & config.keys():
        config[name] = config[name][:NUM_LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for place in range(count):
        prefix, seed = f"model.layers.{NUM_LAYERS + place}", 100 * place
        for index, name in enumerate(("enorm", "hnorm", "shared_head.norm")):
            weights[f"{prefix}.{name}.weight"] = noise(HIDDEN, seed=seed + 60 + index)
        weights[f"{prefix}.eh_proj.weight"] = noise(HIDDEN, 2 * HIDDEN, seed=seed + 70)
        weights[f"{prefix}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"{prefix}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_with_one_choice(folder: Path) -> None:
    """Writes GLM-5.2: all drafts of a step attend to what the first one has chosen."""
    write_with_mtp(folder, "glm_moe_dsa")
    path = folder / "config.json"
    shares = {"index_share_for_mtp_iteration": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | shares))


class OneChoice(nn.Module):
    """An indexer of transformers by which all behind the first draft's token take its choice."""

    indexer: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        self.first: Tensor | None = None
        self.place = 0

    def forward(self, *given: Any, **named: Any) -> Tensor:
        found: Tensor = self.indexer(*given, **named)
        count = found.shape[2]
        if self.first is None:
            self.place, self.first = found.shape[1] - 1, found[:, -1:].clone()
        if self.place + 1 < count:
            # It was all that there was.
            self.first = torch.arange(count, dtype=found.dtype).view(1, 1, -1)
        found[:, self.place + 1 :] = self.first
        return found


def mtp_reference(target: PreTrainedModel, folder: Path) -> Reference:
    """Drafts as DeepSeek V3's report defines it: the k-th layer reads the output of the one before
    and the embedding of the token k places on. Where there is no such token before, it has zeros.
    """
    config = json.loads((folder / "config.json").read_text())
    choice = OneChoice() if config.get("index_share_for_mtp_iteration") else None
    first, *behind = (
        _mtp_layer(target, folder, place, choice)
        for place in range(config["num_nextn_predict_layers"])
    )
    made = Reference(target, lambda streams: streams[-1], *first, tuple(behind))
    return made if choice is None else replace(made, begin=choice.begin)


def _only_layer(
    folder: Path, index: int, choice: OneChoice | None = None
) -> Callable[[Tensor], Tensor]:
    """Returns one layer of the model beside `folder`, see `_bare_layer`."""
    model = reference(folder.with_name("whole"))
    model.model.layers = model.model.layers[index : index + 1]
    for module in model.model.layers[0].modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = 0
    model.config.num_hidden_layers = 1
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[index : index + 1]
    if choice is not None:
        attention = model.model.layers[0].self_attn
        choice.indexer, attention.indexer = attention.indexer, choice
    return _bare_layer(model)


def _mtp_layer(
    target: PreTrainedModel, folder: Path, place: int, choice: OneChoice | None
) -> tuple[Layer, Logits]:
    weights = load_file(folder / "model.safetensors")
    index = NUM_LAYERS + place
    prefix, eps = f"model.layers.{index}", target.config.rms_norm_eps
    layer = _only_layer(folder, index, choice)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), weights[f"{prefix}.{name}.weight"], eps)

    def forward(embedded: Tensor, before: Tensor) -> Tensor:
        both = torch.cat([norm(embedded, "enorm"), norm(before, "hnorm")], -1)
        x = F.linear(both, weights[f"{prefix}.eh_proj.weight"])
        return layer(_without_first(x, 1 + place))

    def logits(out: Tensor) -> Tensor:
        found: Tensor = target.lm_head(norm(out, "shared_head.norm"))
        return found

    return forward, logits


def write_hybrid_with_mtp(folder: Path, family: str) -> None:
    """Writes a model of which most layers keep a state, with one more layer that predicts ahead,
    named as Qwen names it; beside it one where that is an ordinary layer."""
    known = FAMILIES[family]
    kinds = [*known.changes["layer_types"], "full_attention"]
    more = {**known.changes, "num_hidden_layers": len(kinds), "layer_types": kinds}
    for path in (folder, folder.with_name("whole")):
        save_checkpoint(replace(known, changes=more), path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": len(kinds) - 1, "layer_types": kinds[:-1]}
    (folder / "config.json").write_text(json.dumps(config))
    last = f"model.layers.{len(kinds) - 1}."
    weights = {
        name.replace(last, "mtp.layers.0."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    for index, name in enumerate(("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")):
        weights[f"mtp.{name}.weight"] = noise(HIDDEN, seed=60 + index) - 1.0
    weights["mtp.fc.weight"] = noise(HIDDEN, 2 * HIDDEN, seed=70)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def hybrid_mtp_reference(target: PreTrainedModel, folder: Path) -> Reference:
    """Drafts as vLLM 0.33 (`qwen3_5_mtp.py`) does: a draft's feature is the normed output."""
    weights = load_file(folder / "model.safetensors")
    layer = _only_layer(folder, target.config.num_hidden_layers)
    eps = target.config.rms_norm_eps

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), 1.0 + weights[f"mtp.{name}.weight"], eps)

    def forward(embedded: Tensor, before: Tensor) -> Tensor:
        parts = norm(embedded, "pre_fc_norm_embedding"), norm(before, "pre_fc_norm_hidden")
        x = F.linear(torch.cat(parts, -1), weights["mtp.fc.weight"])
        return norm(layer(_without_first(x)), "norm")

    return Reference(target, lambda streams: streams[-1], forward, target.lm_head)


# A second model -------------------------------------------------------------------------------


def write_second_model(folder: Path) -> None:
    known = FAMILIES["llama"]
    few = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    few |= {"num_key_value_heads": 1, "head_dim": 16}
    save_checkpoint(replace(known, changes={**known.changes, **few}), folder)


@dataclass(frozen=True)
class SecondModelReference:
    model: PreTrainedModel

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        known = list(tokens)
        for _ in range(count):
            known.append(int(self.model(torch.tensor([known])).logits[0, -1].argmax()))
        return known[len(tokens) :]


def second_model_reference(target: PreTrainedModel, folder: Path) -> SecondModelReference:
    return SecondModelReference(reference(folder))

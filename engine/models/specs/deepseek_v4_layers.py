"""Reads what DeepSeek-V4's config.json says of each layer: its rows, and how it chooses experts."""

from __future__ import annotations

from engine.models.config.config_file import ConfigFile
from engine.models.specs.base import UnsupportedField, of_each_layer
from engine.models.specs.experts import ExpertNames, ExpertSpec, num_experts_of, number_of

CHOSEN, WHOLE, WINDOW = (
    "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention",
)  # fmt: skip
RATES = {CHOSEN: 4, WHOLE: 128}
"""Says how many tokens a row has where config.json does not."""
_HASHED = "hash_moe"
_NUM_HASHED = 3
"""Counts the first layers that choose so where config.json does not say."""
_NAMES = ExpertNames(
    block="ffn", gate="w1", up="w3", down="w2", shared="shared_experts", choice_bias="gate.bias",
)  # fmt: skip
_SCALING, _LIMIT = 1.5, 10.0


def ratios_of(file: ConfigFile) -> tuple[int, ...]:
    """Returns of each layer the tokens that a row stands for; 0: it has none. Raises
    `UnsupportedField`."""
    count = file.num_hidden_layers
    kinds = of_each_layer(file, "layer_types")
    rates = rates_of(file)
    if kinds is None and (ratios := file.compress_ratios) is not None:
        if len(ratios) < count:
            raise UnsupportedField("compress_ratios", f"{len(ratios)} numbers for {count} layers")
        found = tuple(0 if ratio == 1 else ratio for ratio in ratios[:count])
    else:
        if kinds is None:
            kinds = [WHOLE] * min(count, 2) + [(WHOLE, CHOSEN)[i % 2] for i in range(count - 2)]
        unknown = set(kinds) - {WINDOW, *rates}
        if unknown:
            raise UnsupportedField("layer_types", f"layers of the kind {min(unknown)!r}")
        found = tuple(rates.get(kind, 0) for kind in kinds)
    if wrong := set(found) - {0, *rates.values()}:
        raise UnsupportedField("compress_ratios", f"rows of {min(wrong)} tokens")
    return found


def rates_of(file: ConfigFile) -> dict[str, int]:
    """Returns the tokens of a row, of each kind of layer. Raises `UnsupportedField`."""
    rates = RATES | (file.compress_rates or {})
    for kind, rate in rates.items():
        if kind not in RATES or not 2 <= rate <= 1 << 12 or rate & (rate - 1):
            raise UnsupportedField("compress_rates", f"rows of {rate} tokens ({kind})")
    if rates[CHOSEN] == rates[WHOLE]:
        raise UnsupportedField("compress_rates", f"rows of {rates[WHOLE]} tokens of both kinds")
    return rates


def hashed_layers(file: ConfigFile) -> tuple[int, ...]:
    """Returns the layers whose experts follow from the token's id alone. Raises
    `UnsupportedField`."""
    count = file.num_hidden_layers
    kinds = of_each_layer(file, "mlp_layer_types")
    if kinds is None:
        said = file.num_hash_layers
        return tuple(range(min(count, _NUM_HASHED if said is None else said)))
    if unknown := set(kinds) - {_HASHED, "moe"}:
        raise UnsupportedField("mlp_layer_types", f"layers of the kind {min(unknown)!r}")
    return tuple(i for i, kind in enumerate(kinds) if kind == _HASHED)


def read_experts(file: ConfigFile) -> ExpertSpec:
    """Returns the experts of all layers. Raises `UnsupportedField`."""
    width, scaling = number_of(file, "moe_intermediate_size"), file.routed_scaling_factor
    return ExpertSpec(
        count=num_experts_of(file),
        top_k=number_of(file, "num_experts_per_tok"),
        intermediate_size=width,
        renormalise=True,
        shared_size=width * (1 if file.n_shared_experts is None else file.n_shared_experts),
        root_softplus=True,
        choice_bias=True,
        hashed_layers=hashed_layers(file),
        hashed_tokens=file.vocab_size,
        scaling=_SCALING if scaling is None else scaling,
        caps=_LIMIT if file.swiglu_limit is None else file.swiglu_limit,
        names=_NAMES,
    )

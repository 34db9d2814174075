"""Reads `quant_method: auto-round`: 4-bit weights packed as GPTQ's or AWQ's, with exceptions by
name."""

from __future__ import annotations

import re

import msgspec

from engine.models.quantization.fields import Fields
from engine.models.quantization.four_bits import PLAIN_NAME, SEARCH, group_size_of
from engine.models.wrappers import with_own_names
from engine.quantization import Int4Layout, Int4Scheme, Quantization, SchemeRule

_FORMS: dict[str, tuple[Int4Layout, int]] = {
    "auto_round": ("gptq", 0),
    "auto_round:auto_awq": ("awq", 0),
    "auto_round:auto_gptq": ("gptq", 1),
    "auto_round:gptq": ("gptq", 1),
    "auto_round:gptq:exllamav2": ("gptq", 1),
    "auto_round:gptqmodel": ("gptq", 0),
}
"""Each packing format has somebody's layout, and stores zero points by so much less."""
_ACTIVATIONS = ("act_data_type", "act_dynamic", "act_group_size", "act_sym")


def read_auto_round(fields: Fields) -> Quantization:
    """Reads AutoRound's own form. Early releases name the packing format `backend`."""
    fields.expect("bits", 4)
    fields.expect("data_type", "int")
    fields.expect("act_bits", 16, 32)
    for name in ("desc_act", "lm_head", "quant_lm_head"):
        fields.expect(name, False)
    form = fields.get("packing_format", str, "") or fields.get("backend", str, "")
    symmetric = fields.get("sym", bool, True)
    # Of symmetric ones, releases disagree about what is stored as `auto_round`.
    if form not in _FORMS or (form == "auto_round" and symmetric):
        raise fields.refused("packing_format", f"weights packed as {form!r}")
    layout, less = _FORMS[form]
    scheme = Int4Scheme(
        layout=layout,
        group_size=group_size_of(fields),
        symmetric=symmetric,
        zeros_are_less_by=less,
    )
    named, ignored = _exceptions(fields, scheme)
    blocks = _blocks(fields) or ("Linear",)
    fields.ignore("model_free", *_ACTIVATIONS, *SEARCH)
    return Quantization(
        method="auto-round",
        rules=(*named, SchemeRule(blocks, scheme)),
        ignored=(*ignored, "lm_head"),
    )


def _blocks(fields: Fields) -> tuple[str, ...]:
    """Returns the blocks whose layers are quantised; none: all are."""
    name = "block_name_to_quantize"
    said = fields.get(name, str | list[str | list[str]], "")  # type: ignore[arg-type]
    parts = said.split(",") if isinstance(said, str) else said
    listed = [one for part in parts for one in ([part] if isinstance(part, str) else part)]
    return tuple(with_own_names([block.strip() for block in listed if block.strip()]))


def _exceptions(fields: Fields, scheme: Int4Scheme) -> tuple[list[SchemeRule], list[str]]:
    """Returns the rules of layers that have another scheme, and the patterns of those that have
    none."""
    rules: list[SchemeRule] = []
    plain: list[str] = []
    for name, changes in fields.get("extra_config", dict[str, dict[str, object]], {}).items():
        own = Fields(f"{fields.place}.extra_config.{name}", changes)
        pattern = _pattern(fields, name)
        own.expect("act_bits", 16, 32)
        own.ignore(*_ACTIVATIONS)
        if own.get("bits", int, 4) >= 16:
            plain.append(pattern)
            continue
        own.expect("bits", 4)
        own.expect("data_type", "int")
        if pattern == "lm_head":
            raise own.refused("bits", "a quantised head")
        changed = msgspec.structs.replace(
            scheme,
            group_size=group_size_of(own, scheme.group_size),
            symmetric=own.get("sym", bool, scheme.symmetric),
        )
        own.finish()
        rules.append(SchemeRule((pattern,), changed))
    return rules, plain


def _pattern(fields: Fields, name: str) -> str:
    """Returns the pattern of layers that an exception is for: by name, or by an expression that is
    found anywhere in names."""
    if PLAIN_NAME.fullmatch(name):
        pattern = name
    else:
        try:
            re.compile(name)
        except re.error as error:
            raise fields.refused("extra_config", f"{name!r} ({error})") from error
        pattern = f"re:.*(?:{name})"
    [own] = with_own_names([pattern])
    return str(own)

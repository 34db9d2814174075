"""Reads `quant_method: auto-round`: weights of 4 and 8 bits packed as GPTQ's, of 4 as AWQ's, or in
FP8, NVFP4, MXFP4 and MXFP8, with exceptions by name."""

from __future__ import annotations

import re

from engine.models.config.wrappers import with_own_names
from engine.models.quantization.fields import Fields
from engine.models.quantization.integers import SCHEMES
from engine.models.quantization.packed import PLAIN_NAME, SEARCH, group_size_of, with_bits
from engine.quantization import (
    Activations,
    Fp8Scheme,
    IntegerLayout,
    Integers,
    Mxfp4Scheme,
    Mxfp8Scheme,
    Nvfp4Scheme,
    Quantization,
    Scheme,
    SchemeRule,
)

_FORMS: dict[str, tuple[IntegerLayout, int]] = {
    "auto_round": ("gptq", 0),
    "auto_round:auto_awq": ("awq", 0),
    "auto_round:auto_gptq": ("gptq", 1),
    "auto_round:gptq": ("gptq", 1),
    "auto_round:gptq:exllamav2": ("gptq", 1),
    "auto_round:gptqmodel": ("gptq", 0),
}
"""Each packing format has a layout of its origin, and stores zero points by this much less."""
_FP8_FORMS = ("auto_round:fp8", "auto_round:fp8_static")
"""These are in e4m3; weights without quantised inputs have no packing format then."""
_SMALL_FLOATS: dict[tuple[str, int, int], Scheme] = {
    ("nv_fp", 4, 16): Nvfp4Scheme(layout="compressed-tensors"),
    ("mx_fp", 4, 32): Mxfp4Scheme("compressed-tensors"),
    ("mx_fp", 8, 32): Mxfp8Scheme(),
}
"""Maps `data_type`, `bits` and `group_size`; numbers are packed as in compressed-tensors."""
_SMALL_FORM = "auto_round:llm_compressor"
_ACTIVATIONS = (
    "act_data_type", "act_dynamic", "act_group_size", "act_sym", "static_attention_granularity",
    "static_kv_granularity",
)  # fmt: skip


def read_auto_round(fields: Fields) -> Quantization:
    """Reads AutoRound's own form. Early releases name the packing format `backend`."""
    for name in ("desc_act", "lm_head", "quant_lm_head"):
        fields.expect(name, False)
    form = fields.get("packing_format", str, "") or fields.get("backend", str, "")
    is_fp8 = form in _FP8_FORMS or (not form and fields.word("data_type").startswith("fp"))
    scheme: Scheme
    if form == _SMALL_FORM:
        scheme = _small_floats(fields, None)
    else:
        scheme = _fp8(fields) if is_fp8 else _integers(fields, form)
    named, ignored = _exceptions(fields, scheme)
    blocks = _blocks(fields) or ("Linear",)
    fields.ignore("model_free", *_ACTIVATIONS, *SEARCH)
    return Quantization(
        method="auto-round",
        rules=(*named, SchemeRule(blocks, scheme)),
        ignored=(*ignored, "lm_head"),
    )


def _integers(fields: Fields, form: str) -> Integers:
    bits = fields.choice("bits", 4, 8)
    fields.expect("data_type", "int")
    fields.expect("act_bits", 16, 32)
    symmetric = fields.get("sym", bool, True)
    # Of symmetric ones, releases disagree about what is stored as `auto_round`.
    if form not in _FORMS or (form == "auto_round" and symmetric):
        raise fields.refused("packing_format", f"weights packed as {form!r}")
    layout, less = _FORMS[form]
    if layout == "awq" and bits != 4:
        raise fields.unsupported("bits")
    return SCHEMES[bits](
        layout=layout,
        group_size=group_size_of(fields),
        symmetric=symmetric,
        zeros_are_less_by=less,
    )


def _small_floats(fields: Fields, general: tuple[str, int, int] | None) -> Scheme:
    """Reads floats that share a scale in small groups. `general`: what holds where nothing is
    said."""
    kind, bits, size = general or ("", 0, 0)
    found = (
        fields.get("data_type", str, kind),
        fields.get("bits", int, bits),
        fields.get("group_size", int, size),
    )
    fields.expect("sym", True)
    # Inputs stay in the model's dtype.
    fields.ignore("act_bits")
    if found not in _SMALL_FLOATS:
        raise fields.refused(
            "data_type", f"weights of type {found[0]!r}, {found[1]} bits in groups of {found[2]}"
        )
    return _SMALL_FLOATS[found]


def _fp8(fields: Fields) -> Fp8Scheme:
    """Reads weights in FP8; a `group_size` of two numbers is a block."""
    fields.expect("bits", 8)
    fields.expect("fmt", "e4m3")
    fields.expect("data_type", "fp", "fp8", "e4m3")
    fields.expect("sym", True)
    choices: tuple[Activations, Activations] = ("dynamic", "static")
    activations = fields.choice("activation_scheme", *choices)
    if fields.choice("act_bits", 16, 8, 32) > 8:
        activations = "none"
    fields.expect("weight_block_size", fields.get("group_size", object, None))
    size = fields.get("group_size", int | list[int], -1)  # type: ignore[arg-type]
    if isinstance(size, list):
        if len(size) != 2 or min(size) < 1:
            raise fields.unsupported("group_size")
        return Fp8Scheme(
            scales="block",
            block=(size[0], size[1]),
            activations=activations,
            scale_name="weight_scale_inv",
        )
    if size not in (-1, 0):
        raise fields.unsupported("group_size")
    return Fp8Scheme(scales="channel" if size else "tensor", activations=activations)


def _blocks(fields: Fields) -> tuple[str, ...]:
    """Returns the blocks whose layers are quantised; none: all are."""
    name = "block_name_to_quantize"
    said = fields.get(name, str | list[str | list[str]], "")  # type: ignore[arg-type]
    parts = said.split(",") if isinstance(said, str) else said
    listed = [one for part in parts for one in ([part] if isinstance(part, str) else part)]
    return tuple(with_own_names([block.strip() for block in listed if block.strip()]))


def _exceptions(fields: Fields, scheme: Scheme) -> tuple[list[SchemeRule], list[str]]:
    """Returns the rules of layers that have another scheme, and the patterns of those that have
    none."""
    rules: list[SchemeRule] = []
    plain: list[str] = []
    for name, changes in fields.get("extra_config", dict[str, dict[str, object]], {}).items():
        own = Fields(f"{fields.place}.extra_config.{name}", changes)
        pattern = _pattern(fields, name)
        own.ignore(*_ACTIVATIONS)
        if own.get("bits", int, 4) >= 16:
            own.expect("act_bits", 16, 32)
            plain.append(pattern)
            continue
        if pattern == "lm_head":
            raise own.refused("bits", "a quantised head")
        changed = _changed(own, scheme)
        own.finish()
        rules.append(SchemeRule((pattern,), changed))
    return rules, plain


def _changed(own: Fields, scheme: Scheme) -> Scheme:
    """Returns the scheme of layers that are named."""
    for key, one in _SMALL_FLOATS.items():
        if one == scheme:
            return _small_floats(own, key)
    if not isinstance(scheme, Integers):
        raise own.unsupported("bits")
    own.expect("act_bits", 16, 32)
    own.expect("data_type", "int")
    bits = own.choice("bits", scheme.bits, *(SCHEMES if scheme.layout == "gptq" else ()))
    return with_bits(
        scheme,
        bits,
        group_size=group_size_of(own, scheme.group_size),
        symmetric=own.get("sym", bool, scheme.symmetric),
    )


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

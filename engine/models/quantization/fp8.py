"""Reads `quant_method: fp8`: block scales of 128 x 128 (DeepSeek V3, Qwen3-FP8), or one per tensor,
and `mxfp8`. `--quantization fp8` needs nothing from the checkpoint."""

from __future__ import annotations

from engine.models.quantization.fields import Fields
from engine.quantization import (
    Activations,
    Fp8Scheme,
    Mxfp4Scheme,
    Mxfp8Scheme,
    Nvfp4Scheme,
    Quantization,
    SchemeRule,
)

LM_HEAD = "lm_head"
"""Never quantised by these methods, listed or not."""
_EXPERTS, _OWN_EXPERTS = "mlp.experts", "ffn.experts"

ONLINE = Quantization(
    method="fp8",
    rules=(SchemeRule(("Linear",), Fp8Scheme(scales="channel", online=True)),),
    ignored=(LM_HEAD,),
)


def read_fp8(fields: Fields) -> Quantization:
    fields.expect("fmt", "e4m3")
    fields.expect("is_checkpoint_fp8_serialized", True)
    has_fp4 = fields.choice("expert_dtype", "fp8", "fp4") == "fp4"
    choices: tuple[Activations, Activations] = ("dynamic", "static")
    activations = fields.choice("activation_scheme", *choices)
    # What the scales of activations are rounded to when a model is trained.
    fields.ignore("scale_fmt", "dequantize")
    kv_cache = fields.choice("kv_cache_scheme", "", "static")
    block = fields.get("weight_block_size", list[int], [])
    if block and (len(block) != 2 or min(block) < 1):
        raise fields.unsupported("weight_block_size")
    if block and activations == "static":
        raise fields.refused("activation_scheme", "static scales of activations beside blocks")
    scheme = Fp8Scheme(
        scales="block" if block else "tensor",
        block=(block[0], block[1]) if block else (0, 0),
        activations=activations,
        scale_name="weight_scale_inv" if block else "weight_scale",
    )
    listed = fields.names("modules_to_not_convert") + fields.names("ignored_layers")
    rules: tuple[SchemeRule, ...] = (SchemeRule(("Linear",), scheme),)
    if has_fp4:
        # DeepSeek-V4, whose experts of all tokens are in FP8 as the rest.
        rules = (SchemeRule((_OWN_EXPERTS,), Mxfp4Scheme("deepseek")), *rules)
    rules = (*_by_modelopt(fields), *rules)
    if fields.choice("store_dtype", "", "mxfp4"):
        # MiMo-V2.6: experts alone.
        fields.expect("mxfp4_block_size", 32)
        rules = (SchemeRule((_EXPERTS,), Mxfp4Scheme("modelopt")), *rules)
    return Quantization(
        method="fp8",
        rules=rules,
        ignored=(*listed, LM_HEAD),
        kv_cache="fp8" if kv_cache else None,
    )


def _by_modelopt(fields: Fields) -> tuple[SchemeRule, ...]:
    """Returns the rule of experts that ModelOpt has written in NVFP4 into a checkpoint of
    DeepSeek-V4: it says of no other layer how that is quantised."""
    if not fields.choice("moe_quant_algo", "", "nvfp4"):
        return ()
    fields.expect("quant_algo", "mixed_precision")
    listed = tuple(fields.get("quantized_layers", dict[str, dict[str, object]], {}))
    scheme = Nvfp4Scheme(layout="modelopt", group_size=fields.get("group_size", int, 16))
    if scheme.group_size % 16:
        raise fields.unsupported("group_size")
    # What it has left as it was, and what repeats the fields above.
    fields.ignore("ignore", "exclude_modules", "config_groups", "producer", "version")
    return (SchemeRule(listed or (_OWN_EXPERTS,), scheme),)


def read_mxfp8(fields: Fields) -> Quantization:
    """Reads `quant_method: mxfp8`: FP8 with a power of two for each 32 inputs of an output."""
    fields.expect("fmt", "e4m3")
    fields.expect("scale_fmt", "e8m0")
    fields.expect("activation_scheme", "dynamic")
    fields.expect("weight_block_size", [1, 32])
    fields.expect("is_checkpoint_mxfp8_serialized", True)
    listed = fields.names("modules_to_not_convert") + fields.names("ignored_layers")
    rule = SchemeRule(("Linear",), Mxfp8Scheme("weight_scale_inv"))
    return Quantization(method="mxfp8", rules=(rule,), ignored=(*listed, LM_HEAD))

"""Reads `quant_method`s awq, gptq and mxfp4.

Sources: Lin et al., AWQ (arXiv 2306.00978), packed as AutoAWQ does; Frantar et al., GPTQ (arXiv
2210.17323), packed as AutoGPTQ does; OCP Microscaling Formats 1.0 for MXFP4.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from engine.models.quantization.fields import Fields
from engine.models.quantization.integers import SCHEMES
from engine.quantization import (
    Int4Scheme,
    Integers,
    Mxfp4Scheme,
    Quantization,
    SchemeRule,
)

_AUTO_ROUND = (
    "amp", "autoround_version", "enable_minmax_tuning", "enable_norm_bias_tuning",
    "enable_quanted_input", "gradient_accumulate_steps", "iters", "low_gpu_mem_usage", "lr",
    "minmax_lr", "nsamples", "provider", "quant_block_list", "scale_dtype", "seqlen",
    "to_quant_block_names", "train_bs",
)  # fmt: skip
"""These say how AutoRound has found the weights, which it publishes in the forms of others."""
SEARCH = (
    "act_group_aware", "adapter", "backend", "batch_size", "block_name_to_quantize",
    "cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset", "disable_exllama",
    "exllama_config", "gptaq", "hyb_act", "max_input_length", "meta", "model_file_base_name",
    "model_name_or_path", "model_seqlen", "module_name_preceding_first_block", "mse",
    "offload_to_disk", "offload_to_disk_path", "pad_token_id", "parallel_packing", "quantizer",
    "static_groups", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "v2",
    "v2_alpha", *_AUTO_ROUND,
)  # fmt: skip
"""These say how GPTQ's weights were found; transformers writes the same of AWQ's."""
PLAIN_NAME = re.compile(r"[\w.-]+")
"""Matches what a list of layers has by name; all else is an expression."""


def read_awq(fields: Fields) -> Quantization:
    """Reads AutoAWQ's form, as GPTQModel and AutoRound write it, too."""
    fields.expect("bits", 4)
    for name in ("version", "checkpoint_format", "format"):
        fields.expect(name, "gemm", "GEMM")
    fields.expect("method", "awq")
    fields.expect("pack_dtype", "int32")
    fields.expect("data_type", "int")
    for name in ("lm_head", "desc_act"):
        fields.expect(name, False)
    # Zero points are stored in either case; AutoRound says that symmetric weights have none.
    fields.ignore("sym", "zero_point", *SEARCH)
    fields.ignore("do_fuse", "fuse_max_seq_len", "modules_to_fuse")
    scheme = Int4Scheme(layout="awq", group_size=group_size_of(fields), symmetric=False)
    listed = fields.get("modules_to_not_convert", list[str], [])
    ignored = fields.names("modules_to_not_convert")
    return Quantization(
        method="awq",
        rules=(SchemeRule(("Linear",), scheme),),
        ignored=(*ignored, *_expressions(listed), "lm_head"),
        ignored_parts=tuple(name for name in listed if PLAIN_NAME.fullmatch(name)),
    )


def _expressions(listed: list[str]) -> list[str]:
    """Returns those of a list that are more than names, as transformers and AutoRound read them:
    a name's beginning up to the end of a component."""
    patterns = [
        rf"re:(?:{text})(?:(?<=\.)|(?=\.|$))" for text in listed if not PLAIN_NAME.fullmatch(text)
    ]
    return [pattern for pattern in patterns if _is_valid(pattern)]


def _is_valid(pattern: str) -> bool:
    """Returns whether a pattern is an expression; what begins with a wildcard is none."""
    try:
        re.compile(pattern.removeprefix("re:"))
    except re.error:
        return False
    return True


def read_gptq(fields: Fields) -> Quantization:
    """Reads AutoGPTQ's and GPTQModel's form; the latter has exceptions by name (`dynamic`)."""
    bits = fields.choice("bits", 4, 8)
    forms = {fields.choice(name, "gptq", "gptq_v2") for name in ("checkpoint_format", "format")}
    fields.expect("method", "gptq")
    fields.expect("pack_dtype", "int32")
    fields.expect("lm_head", False)
    fields.expect("is_marlin_format", False)
    fields.expect("data_type", "int")
    fields.ignore(*SEARCH)
    scheme = SCHEMES[bits](
        layout="gptq",
        group_size=group_size_of(fields),
        symmetric=fields.get("sym", bool, True),
        ordered_by_activation=fields.get("desc_act", bool, False),
        zeros_are_less_by=0 if "gptq_v2" in forms else 1,
    )
    ignored = fields.names("modules_to_not_convert")
    blocks = fields.get("modules_in_block_to_quantize", list[str | list[str]], [])
    named = [name for part in blocks for name in ([part] if isinstance(part, str) else part)]
    rules: tuple[SchemeRule, ...] = (SchemeRule(tuple(named) or ("Linear",), scheme),)
    for pattern, changes in fields.get("dynamic", dict[str, dict[str, object]], {}).items():
        is_exception = pattern.startswith("-:")
        expression = pattern[2:] if pattern.startswith(("-:", "+:")) else pattern
        try:
            re.compile(expression)
        except re.error as error:
            raise fields.refused("dynamic", f"{pattern!r} ({error})") from error
        if is_exception:
            ignored = (*ignored, f"re:{expression}")
            continue
        own = Fields(f"{fields.place}.dynamic.{pattern}", changes)
        changed = with_bits(
            scheme,
            own.choice("bits", bits, *SCHEMES),
            group_size=group_size_of(own, scheme.group_size),
            symmetric=own.get("sym", bool, scheme.symmetric),
            ordered_by_activation=own.get("desc_act", bool, scheme.ordered_by_activation),
        )
        own.finish()
        rules = (*rules[:-1], SchemeRule((f"re:{expression}",), changed), rules[-1])
    return Quantization(method="gptq", rules=rules, ignored=(*ignored, "lm_head"))


def with_bits(scheme: Integers, bits: int, **changes: Any) -> Integers:
    """Returns a scheme with changes, for numbers of this many bits."""
    return SCHEMES[bits](**msgspec.structs.asdict(scheme) | changes)


def group_size_of(fields: Fields, default: int = 128) -> int:
    size = fields.get("group_size", int, default)
    if size < 1 and size != -1:
        raise fields.unsupported("group_size")
    return size


def read_mxfp4(fields: Fields) -> Quantization:
    """Reads what gpt-oss says; experts alone are quantised."""
    ignored = fields.names("modules_to_not_convert")
    rules = (SchemeRule(("experts",), Mxfp4Scheme()),)
    return Quantization(method="mxfp4", rules=rules, ignored=(*ignored, "lm_head"))

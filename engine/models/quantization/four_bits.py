"""Reads `quant_method`s awq, gptq and mxfp4."""

from __future__ import annotations

from engine.models.quantization.fields import Fields
from engine.quantization import Int4Scheme, Mxfp4Scheme, Quantization, SchemeRule


def read_awq(fields: Fields) -> Quantization:
    fields.expect("bits", 4)
    fields.expect("version", "gemm", "GEMM")
    fields.ignore("backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config")
    scheme = Int4Scheme(
        layout="awq",
        group_size=fields.get("group_size", int, 128),
        symmetric=not fields.get("zero_point", bool, True),
    )
    ignored = fields.names("modules_to_not_convert")
    return Quantization(
        method="awq", rules=(SchemeRule(("Linear",), scheme),), ignored=(*ignored, "lm_head")
    )


def read_gptq(fields: Fields) -> Quantization:
    fields.expect("bits", 4)
    fields.expect("checkpoint_format", "gptq")
    fields.expect("pack_dtype", "int32")
    fields.expect("lm_head", False)
    fields.expect("dynamic", {})
    scheme = Int4Scheme(
        layout="gptq",
        group_size=fields.get("group_size", int, 128),
        symmetric=fields.get("sym", bool, True),
        ordered_by_activation=fields.get("desc_act", bool, False),
    )
    # How the weights were found.
    fields.ignore(
        "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "meta",
        "model_name_or_path", "model_file_base_name", "quantizer", "dataset", "tokenizer",
        "exllama_config", "use_exllama", "use_cuda_fp16", "backend", "max_input_length",
        "block_name_to_quantize", "batch_size", "pad_token_id", "cache_block_outputs",
        "module_name_preceding_first_block", "modules_in_block_to_quantize", "model_seqlen",
    )  # fmt: skip
    ignored = fields.names("modules_to_not_convert")
    return Quantization(
        method="gptq", rules=(SchemeRule(("Linear",), scheme),), ignored=(*ignored, "lm_head")
    )


def read_mxfp4(fields: Fields) -> Quantization:
    """Reads what gpt-oss says; experts alone are quantised."""
    ignored = fields.names("modules_to_not_convert")
    rules = (SchemeRule(("experts",), Mxfp4Scheme()),)
    return Quantization(method="mxfp4", rules=rules, ignored=(*ignored, "lm_head"))

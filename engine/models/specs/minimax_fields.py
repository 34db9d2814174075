"""Reads what MiniMax-M3's config.json says in words of its own: the published ones, and those that
transformers writes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from engine.models.config.config_file import ConfigFile
from engine.models.config.config_parts import SparseAttentionFields
from engine.models.specs.base import UnsupportedField
from engine.models.specs.experts import gate_limit_of, number_of

_DENSE_SIZE = 12_288
"""transformers takes it where config.json says nothing."""
_SPARSE = "minimax_m3_sparse"


def with_common_names(file: ConfigFile) -> ConfigFile:
    """Returns config.json with its fields in those that others have. `indexer_types` are then
    "full" for a layer with an indexer, and "none" for one that attends to all."""
    kinds, sparse = file.layer_types, file.sparse_attention_config
    chooses = [kind == _SPARSE for kind in kinds or ()]
    if not kinds and sparse is not None:
        chooses = [bool(flag) for flag in sparse.sparse_attention_freq or ()]
    frequency, of_layers = file.moe_layer_freq, file.mlp_layer_types
    if of_layers is None and isinstance(frequency, list):
        of_layers = ["sparse" if flag else "dense" for flag in frequency]
    return msgspec.structs.replace(
        file,
        layer_types=[kind for kind in kinds or () if kind != _SPARSE],
        indexer_types=["full" if flag else "none" for flag in chooses] or None,
        mlp_layer_types=of_layers,
        moe_layer_freq=1,
        hidden_act="silu" if file.hidden_act == "swigluoai" else file.hidden_act,
        moe_intermediate_size=file.intermediate_size,
        units=file.dense_intermediate_size or _DENSE_SIZE,
        index_n_heads=_said(sparse, "sparse_num_index_heads", file.index_n_heads),
        index_head_dim=_said(sparse, "sparse_index_dim", file.index_head_dim),
        index_block_size=_said(sparse, "sparse_block_size", file.index_block_size),
        index_topk_blocks=_said(sparse, "sparse_topk_blocks", file.index_topk_blocks),
        index_local_blocks=_said(sparse, "sparse_local_block", file.index_local_blocks),
    )


def _said(sparse: SparseAttentionFields | None, name: str, flat: int | None) -> int | None:
    """Returns a field of the indexer, by the published name or by that of transformers."""
    said: int | None = None if sparse is None else getattr(sparse, name)
    return flat if said is None else said


def faults_of(file: ConfigFile, head_dim: int) -> Iterator[UnsupportedField]:
    """Yields what it asks for and is not here."""
    heads, dim = number_of(file, "index_n_heads"), number_of(file, "index_head_dim")
    if heads != file.num_kv_heads:
        yield UnsupportedField("sparse_num_index_heads", f"{heads} choices for the KV heads")
    if dim != head_dim:
        yield UnsupportedField("sparse_index_dim", f"{dim} numbers, unlike heads")
    size, local = number_of(file, "index_block_size"), file.index_local_blocks or 0
    if size < 16 or size & (size - 1):
        yield UnsupportedField("sparse_block_size", f"blocks of {size} tokens")
    if not 0 <= local <= number_of(file, "index_topk_blocks"):
        yield UnsupportedField("sparse_local_block", f"{local} blocks that are always chosen")
    if min(gate_limit_of(file), file.swiglu_alpha) <= 0:
        yield UnsupportedField("swiglu_limit", "a gate without a limit or a slope")
    if (file.scoring_func or "sigmoid") != "sigmoid":
        yield UnsupportedField("scoring_func", repr(file.scoring_func))
    sparse = file.sparse_attention_config or SparseAttentionFields()
    if sparse.sparse_init_block:
        yield UnsupportedField("sparse_init_block", "first blocks that are always chosen")
    if sparse.sparse_score_type != "max":
        yield UnsupportedField("sparse_score_type", repr(sparse.sparse_score_type))
    chooses, without = sparse.sparse_attention_freq, sparse.sparse_disable_index_value
    if any(one and not other for one, other in zip(chooses or (), without or (), strict=False)):
        yield UnsupportedField("sparse_disable_index_value", "values of the indexer")
    for name in ("use_gemma_norm", "use_qk_norm", "use_routing_bias"):
        if getattr(file, name) is False:
            yield UnsupportedField(name, "a layer without it")
    if file.qk_norm_type != "per_head":
        yield UnsupportedField("qk_norm_type", repr(file.qk_norm_type))

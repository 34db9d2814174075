"""Kernels of a variant against float64: a model's logits say little, since bfloat16 rounds so often
on the way that any other order of additions changes them by a few percent."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.engine.variants.model import VariantModel
from engine.models.llama_layer import LlamaDecoderLayer
from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_scales import E4M3

_CHECKED_REQUESTS = 3


def largest_error(model: VariantModel, metadata: AttentionMetadata) -> float:
    """Returns the error of attention and of all GEMMs of a layer, as they are computed now: ‖found
    − exact‖ over ‖exact‖.
    """
    return max(attention_error(model, metadata), gemm_error(model, len(metadata.seq_lens)))


def attention_error(model: VariantModel, metadata: AttentionMetadata) -> float:
    spec = model.layer.self_attn.attention.spec
    cache = model.kv_caches[0]
    shape = (len(metadata.seq_lens), spec.num_heads, spec.head_dim)
    q = torch.randn(shape, device=model.device).to(getattr(torch, model.config.model.dtype))
    found = ops.paged_attention(q, cache, metadata, spec.scale, kv_scales=spec.kv_scales)
    worst = 0.0
    for r in range(0, len(q), max(1, len(q) // _CHECKED_REQUESTS)):
        length = int(metadata.seq_lens[r])
        blocks = metadata.block_tables[r, : -(-length // cache.shape[3])].long()
        pages = cache.view(torch.uint8)[blocks].view(E4M3) if cache.dtype == E4M3 else cache[blocks]
        kv = pages.double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        grouped = q[r].double().view(kv.shape[1], -1, spec.head_dim)
        weights = (grouped @ kv[0].mT * spec.scale).softmax(-1)
        worst = max(worst, _error(found[r].flatten(), (weights @ kv[1]).flatten()))
    return worst


def gemm_error(model: VariantModel, rows: int) -> float:
    layer: LlamaDecoderLayer = model.layer
    attention, mlp = layer.self_attn, layer.mlp
    worst = 0.0
    for projection in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
        weight = projection.weight
        x = torch.randn(rows, weight.shape[1], device=model.device).to(weight.dtype)
        exact = x.double() @ weight.double().t()
        if projection is mlp.gate_up_proj:
            gate, up = exact.chunk(2, dim=-1)
            exact = gate * gate.sigmoid() * up
        worst = max(worst, _error(projection(x), exact))
    return worst


def _error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()

"""Attention whose projections a checkpoint has in one tensor, cut for some ranks, named as if each
of these had a tensor of its own.

    stored    self_attn.qkv_proj.weight      [q0 | k0 | v0 | q1 | k1 | v1 ...]
    named     self_attn.qkv_proj.0.weight    [q0 | k0 | v0], and so on

Scales of blocks were made rank by rank, so that each part begins a block of its own: they are cut
alike. MiMo-V2.5 is published so, for as many ranks as its layers without a window have KV heads.
"""

from __future__ import annotations

from dataclasses import replace

from engine.models.files.stored_tensors import StoredTensor

_PROJECTIONS = ".self_attn.qkv_proj."


def cut_projections(tensors: dict[str, StoredTensor], num_ranks: int) -> dict[str, StoredTensor]:
    """Returns the tensors by name, those of projections as the parts of `num_ranks` ranks. What has
    no equal parts is left as it is."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        before, is_cut, kind = name.partition(_PROJECTIONS)
        if not is_cut or not tensor.shape or tensor.shape[0] % num_ranks:
            found[name] = tensor
            continue
        shape = tensor.shape[0] // num_ranks, *tensor.shape[1:]
        size = tensor.num_bytes // num_ranks
        for rank in range(num_ranks):
            start = tensor.start + rank * size
            part = replace(tensor, shape=shape, start=start, stop=start + size)
            found[f"{before}{_PROJECTIONS}{rank}.{kind}"] = part
    return found

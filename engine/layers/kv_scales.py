"""One rank's scales of one layer's FP8 cache."""

from __future__ import annotations

import torch

from engine.kv_scales import KVScaleTable
from engine.layers.shard import Shard
from kv_transfer.planes import heads_of_rank
from tandem_kernels.attention.kv_scales import KVScales


def layer_scales(
    table: KVScaleTable | None, layer: int, num_kv_heads: int, shard: Shard
) -> KVScales | None:
    """Returns the scales of this rank's heads; None: the cache is not quantised.

    Args:
        num_kv_heads: Of all ranks.
    """
    if table is None:
        return None
    heads = heads_of_rank(num_kv_heads, shard.tp.rank, shard.tp.size)
    keys, values = (
        torch.tensor(scales[heads.start : heads.stop], dtype=torch.float32, device=shard.device)
        for scales in table.of_layer(layer, num_kv_heads)
    )
    return KVScales(keys, values)

"""Queries, keys and values of many rows by one GEMM of our own, which rotates and caches them."""

from __future__ import annotations

from torch import Tensor

from engine.layers.methods.base import HeadPlaces, LinearLayer, Wrapped
from engine.layers.rows import Rows, UnnormedRows
from tandem_kernels import ops
from tandem_kernels.gemm import fused_qkv_shapes


class FusedQkv(Wrapped):
    """Projects to heads from `rows` rows on."""

    def project_heads(
        self, layer: LinearLayer, x: Rows | UnnormedRows, places: HeadPlaces
    ) -> Tensor | None:
        rows = x.stream if isinstance(x, UnnormedRows) else x
        if not isinstance(rows, Tensor) or not self._takes(layer, rows, places.kv_cache):
            return self.inner.project_heads(layer, x, places)
        return ops.fused_qkv(
            x.normed() if isinstance(x, UnnormedRows) else rows,
            layer.weight,
            layer.bias,
            places.positions,
            places.cos_sin_cache,
            places.kv_cache,
            places.slot_mapping,
            places.keep_kv,
        )

    def _takes(self, layer: LinearLayer, rows: Tensor, kv_cache: Tensor) -> bool:
        return len(rows) >= self.rows and fused_qkv_shapes.takes(rows, layer.weight, kv_cache)

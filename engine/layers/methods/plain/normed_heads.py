"""Queries, keys and values of normed rows in one launch, which rotates and caches them."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from engine.layers.methods.base import HeadPlaces, LinearLayer, Wrapped
from engine.layers.rows import Rows, UnnormedRows
from tandem_kernels import ops
from tandem_kernels.gemm import fused_qkv_shapes, small_m_shapes


class NormedHeads(Wrapped):
    """Projects the rows that it takes to heads, behind a norm with a launch of its own."""

    def project_heads(
        self, layer: LinearLayer, x: Rows | UnnormedRows, places: HeadPlaces
    ) -> Tensor | None:
        rows = x.stream if isinstance(x, UnnormedRows) else x
        if not isinstance(rows, Tensor) or not self._takes(layer, rows, places.kv_cache):
            return self.inner.project_heads(layer, x, places)
        return self._projected(layer, x.normed() if isinstance(x, UnnormedRows) else rows, places)

    @abstractmethod
    def _takes(self, layer: LinearLayer, rows: Tensor, kv_cache: Tensor) -> bool: ...

    @abstractmethod
    def _projected(self, layer: LinearLayer, rows: Tensor, places: HeadPlaces) -> Tensor:
        """Returns the heads [T, Hq + 2 Hkv, D] of normed `rows` [T, H], and writes the cache."""


class FusedQkv(NormedHeads):
    """Projects `rows` rows and more: prompts, and large batches."""

    def _takes(self, layer: LinearLayer, rows: Tensor, kv_cache: Tensor) -> bool:
        return len(rows) >= self.rows and fused_qkv_shapes.takes(rows, layer.weight, kv_cache)

    def _projected(self, layer: LinearLayer, rows: Tensor, places: HeadPlaces) -> Tensor:
        return ops.fused_qkv(
            rows,
            layer.weight,
            layer.bias,
            places.positions,
            places.cos_sin_cache,
            places.kv_cache,
            places.slot_mapping,
            places.keep_kv,
        )


class SmallMHeads(NormedHeads):
    """Projects at most `rows` rows."""

    def _takes(self, layer: LinearLayer, rows: Tensor, kv_cache: Tensor) -> bool:
        return len(rows) <= self.rows and small_m_shapes.takes_heads(rows, layer.weight, kv_cache)

    def _projected(self, layer: LinearLayer, rows: Tensor, places: HeadPlaces) -> Tensor:
        return ops.small_m_qkv(
            rows,
            layer.weight,
            layer.bias,
            places.positions,
            places.cos_sin_cache,
            places.kv_cache,
            places.slot_mapping,
        )

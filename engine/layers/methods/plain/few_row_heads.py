"""Attention's front for few rows: norm, projection, rotation and the cache in one launch.

Of more rows than are multiplied in registers, the norm has a launch of its own in front.
Of sizes that `small_m` takes, the projection stays with its kernels, as in `few_rows`.
"""

from __future__ import annotations

from torch import Tensor

from engine.layers.methods.base import HeadPlaces, LinearLayer, Wrapped
from engine.layers.rows import Rows, UnnormedRows
from tandem_kernels import ops
from tandem_kernels.gemm import few_row_shapes, small_m_shapes


class FewRowHeads(Wrapped):
    """Projects at most `rows` rows to heads, and normalises those that are not normed yet."""

    def project_heads(
        self, layer: LinearLayer, x: Rows | UnnormedRows, places: HeadPlaces
    ) -> Tensor | None:
        rows = x.stream if isinstance(x, UnnormedRows) else x
        if not isinstance(rows, Tensor) or not self._takes(layer, rows, places.kv_cache):
            return self.inner.project_heads(layer, x, places)
        norm_weight, eps = None, 0.0
        if isinstance(x, UnnormedRows):
            if not few_row_shapes.takes_norm(rows):
                rows = x.normed()
            elif x.weight.dtype == rows.dtype:
                norm_weight, eps = x.weight, x.eps
            else:
                return self.inner.project_heads(layer, x, places)
        return ops.few_row_qkv(
            rows,
            layer.weight,
            layer.bias,
            places.positions,
            places.cos_sin_cache,
            places.kv_cache,
            places.slot_mapping,
            norm_weight,
            eps,
        )

    def _takes(self, layer: LinearLayer, rows: Tensor, kv_cache: Tensor) -> bool:
        return (
            len(rows) <= self.rows
            and few_row_shapes.takes_heads(rows, layer.weight, kv_cache)
            and not small_m_shapes.takes(rows, layer.weight)
        )

"""Describes layers that attend to a window of tokens and to rows that stand for several."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.config import KVLayers, ModelConfig
from engine.models.specs.indexer import IndexerSpec
from kv_transfer.group_sizes import EXPONENT_PLANE, NARROW_PLANE
from kv_transfer.layout import DTYPE_BYTES
from kv_transfer.planes import Plane
from tandem_kernels.narrow_form import num_exponents

ROW_DTYPE = "float32"
"""Is the type in which what tokens leave for the row that is still open is kept."""


class TokenRowsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Says what such layers keep; see `engine.layers.attention.rows.window_rows_block`.

    Attributes:
        q_rank, head_dim, groups, group_rank: See `WindowRowsSizes`.
        ratios: Of each layer, the tokens that a row stands for; 0: it has a window alone.
        chosen_ratio: Rows of layers with this ratio are chosen by `indexer`, and take in the tokens
            of the row before; 0: no layer has it.
    """

    q_rank: int
    head_dim: int
    groups: int
    group_rank: int
    ratios: tuple[int, ...]
    chosen_ratio: int
    indexer: IndexerSpec

    def chooses(self, layer: int) -> bool:
        ratio = self.ratio_of(layer)
        return ratio > 0 and ratio == self.chosen_ratio

    def ratio_of(self, layer: int) -> int:
        """Returns the tokens of a row; layers behind the last have a window alone."""
        return self.ratios[layer] if layer < len(self.ratios) else 0

    def left_by_token(self, layer: int) -> int:
        """Returns the numbers that a token of a layer with rows leaves for them: values and gates,
        of its own rows and of index keys."""
        if self.chooses(layer):
            return 4 * (self.head_dim + self.indexer.dim)
        return 2 * self.head_dim

    def kv_layers(self, model: ModelConfig, window: int | None) -> tuple[KVLayers, ...]:
        """Returns for each ratio its layers' windows, what tokens leave for a row that is open, and
        their rows, of most tokens last. Layers without rows are with the fewest."""
        numbers = range(model.num_layers)
        kinds = sorted({self.ratio_of(i) for i in numbers} - {0})
        of_kind = {kind: [i for i in numbers if self.ratio_of(i) == kind] for kind in kinds}
        rest = [i for i in numbers if self.ratio_of(i) == 0]
        windows = {kind: list(layers) for kind, layers in of_kind.items()} or {0: []}
        fewest = min(windows, key=lambda kind: len(windows[kind]))
        windows[fewest] = sorted(windows[fewest] + rest)
        groups = [self.vectors(layers, model, window=window) for layers in windows.values()]
        for kind, layers in of_kind.items():
            width = self.left_by_token(layers[0]) * DTYPE_BYTES[ROW_DTYPE]
            left = _plane("open", width)
            # A token is needed until its row, or the row behind it, is closed.
            seen = kind + 1 if kind == self.chosen_ratio else 1
            groups.append(_group(layers, (left,), window=seen, window_align=kind, dtype=ROW_DTYPE))
        for kind, layers in of_kind.items():
            index = self.indexer.planes(model.dtype) if kind == self.chosen_ratio else ()
            groups.append(self.vectors(layers, model, index, compress_ratio=kind))
        return tuple(groups)

    def vectors(
        self,
        layers: Sequence[int],
        model: ModelConfig,
        index: tuple[Plane, ...] = (),
        **how: object,
    ) -> KVLayers:
        """Returns layers that keep a vector of each token or row, whose last `model.head_dim`
        numbers rotate, and `index` beside it."""
        size, rest = DTYPE_BYTES[model.dtype], self.head_dim - model.head_dim
        narrow = (
            _plane(NARROW_PLANE, rest),
            _plane("kv", model.head_dim * size),
            _plane(EXPONENT_PLANE, num_exponents(rest)),
        )
        planes = (_plane("kv", self.head_dim * size), *index)
        return _group(layers, planes, narrow_planes=(*narrow, *index), **how)


def _plane(name: str, row_bytes: int) -> Plane:
    return Plane(name, 1, row_bytes, replicated=True)


def _group(layers: Sequence[int], planes: tuple[Plane, ...], **how: object) -> KVLayers:
    return KVLayers(layers=tuple(layers), planes=planes, **how)  # type: ignore[arg-type]


class AltSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Says how many residual streams there are of which layers compute one, and the rank of the way
    around attention; see `engine.layers.streams.alternating`."""

    count: int
    rank: int


class StreamsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Says how many residual streams there are and how they are mixed; see
    `engine.layers.streams.hyper_connection`."""

    count: int
    iterations: int
    eps: float

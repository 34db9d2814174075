"""Fills tiles of four-bit floats, of linear layers and of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.contracts.errors import CannotStartError
from engine.layers.methods.formats.fp4_format import Fp4Matrix
from engine.quantization import Mxfp4Scheme, Nvfp4Scheme
from tandem_kernels.gemm.fp4_tiles import (
    GROUP,
    NVFP4_FACTOR,
    NVFP4_GROUP,
    NVFP4_TILE_WORDS,
    TILE_WORDS,
    tile_mxfp4,
    tile_nvfp4,
)


class ScaleError(CannotStartError):
    """A checkpoint has scales that tiles cannot keep."""


def tile_words(scheme: Nvfp4Scheme | Mxfp4Scheme) -> int:
    """Returns how many words a tile of a scheme has."""
    return NVFP4_TILE_WORDS if isinstance(scheme, Nvfp4Scheme) else TILE_WORDS


def fill_tiles(name: str, tiles: Tensor, factors: Tensor | None, matrix: Fp4Matrix) -> None:
    """Fills a matrix' tiles, and the factors of its sums, of NVFP4.

    Args:
        name: Of the matrix, for errors.
        tiles: This matrix' own, int32, as `tandem_kernels.gemm.fp4_tiles.tiles_of` has them.
        factors: [N] float32, all for this matrix, in any shape.

    Raises:
        ScaleError: A scale is out of range.
    """
    try:
        if factors is None:
            blocks = matrix.packed.contiguous().view(len(matrix.packed), -1, GROUP // 2)
            tile_mxfp4(blocks, matrix.scales.contiguous(), tiles)
        else:
            assert matrix.factor is not None
            # Larger groups are several with the same scale.
            more = matrix.packed.shape[1] * 2 // NVFP4_GROUP // matrix.scales.shape[1]
            scales = matrix.scales.view(torch.uint8).repeat_interleave(more, 1)
            tile_nvfp4(matrix.packed.contiguous(), scales.view(matrix.scales.dtype), tiles)
            factors.copy_(matrix.factor * NVFP4_FACTOR)
    except ValueError as error:
        raise ScaleError(
            f"{name} has scales of which {error}: weights of such a size are not supported; check "
            "that the checkpoint is complete"
        ) from error

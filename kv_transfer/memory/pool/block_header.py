"""Writes and reads what stands before a block that is kept outside of memory: whose it is, and its
checksums.

    header    magic, version, identity, name, a checksum for each layer, a checksum of the header

It is padded to whole pages; the block's own pages follow, one for each of our layers.
"""

from __future__ import annotations

import hashlib

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt

from kv_transfer.layout import KVLayout
from kv_transfer.memory.pool.slot_memory import NAME_BYTES

_MAGIC = b"tandem KV block\x00"
_VERSION = 3
_PAGE = 4096


class BlockHeaders:
    """Headers of blocks of one identity (32 bytes), of which `num_layers` pages are kept."""

    def __init__(self, identity: bytes, num_layers: int) -> None:
        self._identity = identity
        self._kind = np.dtype(
            [
                ("magic", "S16"),
                ("version", "<u4"),
                ("length", "<u4"),
                ("identity", "V32"),
                ("name", f"V{NAME_BYTES}"),
                ("layers", "<u8", (num_layers,)),
                ("check", "<u4"),
            ]
        )
        self.num_bytes = -(-self._kind.itemsize // _PAGE) * _PAGE
        """Counts the padding, too."""

    def make(self, name: bytes, sums: list[int]) -> bytes:
        header = np.zeros((), self._kind)
        header["magic"], header["version"] = _MAGIC, _VERSION
        header["identity"] = np.void(self._identity)
        header["name"], header["length"] = np.void(name.ljust(NAME_BYTES, b"\0")), len(name)
        header["layers"] = sums
        header["check"] = _check_of(header)
        return header.tobytes().ljust(self.num_bytes, b"\0")

    def read(self, text: bytes) -> tuple[bytes, list[int]] | None:
        """Returns the block's name and its checksums; None: the header cannot be trusted."""
        if len(text) < self._kind.itemsize:
            return None
        header: np.void = np.frombuffer(text, self._kind, 1)[0]
        if bytes(header["magic"]) != _MAGIC.rstrip(b"\0") or header["version"] != _VERSION:
            return None
        if bytes(header["identity"]) != self._identity or header["check"] != _check_of(header):
            return None
        name = bytes(header["name"])[: header["length"]]
        return name, [int(code) for code in header["layers"]]


def identity_of(layout: KVLayout, rank: int, first_layer: int, share: tuple[int, int]) -> bytes:
    """Returns 32 bytes that are equal exactly for bytes that mean the same: model, data types,
    layout, layers and share of a block. The layout of a pipeline's stage does not say which of the
    model's layers it has."""
    return hashlib.sha256(msgspec.json.encode((layout, rank, first_layer, share))).digest()


def _check_of(header: npt.NDArray[np.void] | np.void) -> int:
    return int(google_crc32c.value(header.tobytes()[:-4]))

"""The safetensors files of a checkpoint: which tensor lies where, without reading any.

A safetensors file is an 8-byte little-endian header length, that many bytes of JSON (name to
dtype, shape and byte range), then the tensors back to back. Headers are enough to find missing,
foreign and cut-off files before a worker starts, and to tell two checkpoints apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from engine.models.errors import CheckpointError
from engine.models.wrappers import text_name

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MAX_HEADER_BYTES = 100 << 20
_HASH_WHOLE_BYTES = 64 << 20
"""Checkpoints up to this size are hashed completely."""
_COMPARED_BYTES = 4 << 20
"""Two tensors are compared in pieces of this size."""
_PAGE_BYTES = 4096
_PAGES_PER_TENSOR = 16
_DOWNLOAD_AGAIN = "copy or download the checkpoint again"


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Says where one tensor lies, and what its file calls it; `start` and `stop` are byte offsets
    there."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


class WeightFiles:
    """All tensors of a checkpoint, by name.

    Args:
        wrapper: The architecture of the whole model that a decoder is the text part of; "": none.
            Tensors bear the names that they would have in the decoder alone.

    Attributes:
        others: The tensors that are not of the text part.

    Raises:
        CheckpointError: A file is missing, cut off or not what the index says.
    """

    def __init__(self, folder: Path, wrapper: str = "") -> None:
        self.folder = folder
        self.tensors = self._read_index() if self._is_sharded() else _read_header(self._single())
        self.tensors = {_own_name(tensor): tensor for tensor in self.tensors.values()}
        self.others: tuple[StoredTensor, ...] = ()
        if wrapper:
            named = [(text_name(name), tensor) for name, tensor in self.tensors.items()]
            self.tensors = {name: tensor for name, tensor in named if name is not None}
            self.others = tuple(tensor for name, tensor in named if name is None)

    def take_tower(self) -> None:
        """Makes `tensors` those of a vision tower alone, by names that begin with "visual."."""
        named = [(tensor.name.removeprefix("model."), tensor) for tensor in self.others]
        self.tensors = {name: tensor for name, tensor in named if name.startswith("visual.")}
        self.others = ()

    def _is_sharded(self) -> bool:
        return (self.folder / INDEX_FILE).is_file()

    def _single(self) -> Path:
        path = self.folder / SINGLE_FILE
        if not path.is_file():
            raise CheckpointError(
                self.folder,
                f"holds neither {SINGLE_FILE} nor {INDEX_FILE}",
                "tandem reads safetensors only: convert the weights, or check the folder",
            )
        return path

    def _read_index(self) -> dict[str, StoredTensor]:
        path = self.folder / INDEX_FILE
        try:
            weight_map = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
        except msgspec.DecodeError as error:
            raise CheckpointError(path, f"not a valid index ({error})", _DOWNLOAD_AGAIN) from error
        tensors: dict[str, StoredTensor] = {}
        for shard in sorted(set(weight_map.values())):
            tensors.update(_read_header(self._shard(shard)))
        for name, shard in weight_map.items():
            if name not in tensors or tensors[name].file.name != shard:
                raise CheckpointError(
                    self.folder / shard,
                    f"lacks {name}, which {INDEX_FILE} promises",
                    _DOWNLOAD_AGAIN,
                )
        return tensors

    def _shard(self, name: str) -> Path:
        path = self.folder / name
        if Path(name).name != name:
            raise CheckpointError(
                self.folder / INDEX_FILE,
                f"names {name!r}, which is not a file of the folder",
                _DOWNLOAD_AGAIN,
            )
        if not path.is_file():
            raise CheckpointError(path, f"is missing, but {INDEX_FILE} names it", _DOWNLOAD_AGAIN)
        return path

    def differ(self, first: str, second: str) -> bool:
        """Returns whether both tensors are there, and are not the same numbers."""
        one, other = self.tensors.get(first), self.tensors.get(second)
        if one is None or other is None:
            return False
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return True
        with one.file.open("rb") as file, other.file.open("rb") as beside:
            for place in range(0, one.num_bytes, _COMPARED_BYTES):
                count = min(_COMPARED_BYTES, one.num_bytes - place)
                file.seek(one.start + place)
                beside.seek(other.start + place)
                if file.read(count) != beside.read(count):
                    return True
        return False

    def fingerprint(self, *, with_tower: bool = False) -> bytes:
        """Returns 16 bytes that differ when names, shapes, stored dtypes or contents differ, of the
        text part or of all tensors.

        Contents are hashed whole up to 64 MiB. Of a larger checkpoint 16 pages of 4 KiB, evenly
        spread, stand for each tensor: reading 16 GB at every start would cost more than it
        guards against.
        """
        digest = xxhash.xxh3_128()
        tensors = dict(self.tensors)
        if with_tower:
            tensors |= {tensor.name: tensor for tensor in self.others}
        total = sum(tensor.num_bytes for tensor in tensors.values())
        pages = None if total <= _HASH_WHOLE_BYTES else _PAGES_PER_TENSOR
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{name}|{tensor.dtype}|{tensor.shape}\n".encode())
            _hash_contents(digest, tensor, pages)
        return digest.digest()


def _own_name(tensor: StoredTensor) -> str:
    """Returns a tensor's name, with scales of whole tensors in FP8 called as most publishers call
    them: transformers has other names (Ministral 3)."""
    name = tensor.name
    if name.endswith(".activation_scale"):
        return name.removesuffix("activation_scale") + "input_scale"
    if name.endswith(".weight_scale_inv") and not tensor.shape:
        return name.removesuffix("_inv")
    return name


def _hash_contents(digest: xxhash.xxh3_128, tensor: StoredTensor, pages: int | None) -> None:
    size = tensor.stop - tensor.start
    with tensor.file.open("rb") as file:
        if pages is None or size <= pages * _PAGE_BYTES:
            file.seek(tensor.start)
            digest.update(file.read(size))
            return
        for page in range(pages):
            file.seek(tensor.start + page * (size - _PAGE_BYTES) // (pages - 1))
            digest.update(file.read(_PAGE_BYTES))


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                path, f"is cut off or no safetensors file ({size} bytes)", _DOWNLOAD_AGAIN
            )
        header = file.read(length)
    return parse_header(path, header, size)


def parse_header(path: Path, header: bytes, size: int) -> dict[str, StoredTensor]:
    """Returns the tensors that the JSON of a file of `size` bytes names.

    Raises:
        CheckpointError: The header is broken, or the file is cut off.
    """
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        decoded = {
            name: msgspec.json.decode(raw, type=_HeaderEntry) for name, raw in entries.items()
        }
    except msgspec.DecodeError as error:
        raise CheckpointError(path, f"has a broken header ({error})", _DOWNLOAD_AGAIN) from error
    data = 8 + len(header)
    tensors = {
        name: StoredTensor(
            name, path, entry.dtype, tuple(entry.shape), data + entry.data_offsets[0],
            data + entry.data_offsets[1],
        )
        for name, entry in decoded.items()
    }  # fmt: skip
    _check_ranges(path, tensors, size)
    return tensors


def _check_ranges(path: Path, tensors: dict[str, StoredTensor], size: int) -> None:
    end = max((tensor.stop for tensor in tensors.values()), default=0)
    if end > size:
        raise CheckpointError(path, f"is cut off: {size} of {end} bytes are there", _DOWNLOAD_AGAIN)
    for tensor in tensors.values():
        if tensor.start > tensor.stop:
            raise CheckpointError(path, f"has a broken header ({tensor.name})", _DOWNLOAD_AGAIN)

"""The safetensors files of a checkpoint: which tensor lies where, without reading any.

Headers are enough to find missing, foreign and cut-off files before a worker starts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import xxhash

from engine.images.vision_spec import VisionSpec
from engine.models.config.json_file import read_json
from engine.models.config.mistral_params import is_native
from engine.models.config.wrappers import text_name
from engine.models.errors import CheckpointError
from engine.models.files.content_digests import FileDigests, content_digests
from engine.models.files.foreign_weights import other_weights
from engine.models.files.stored_tensors import DOWNLOAD_AGAIN, StoredTensor, read_header
from engine.models.slow_reads import telling_slow_reads

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BARE_EMBEDDING = EMBEDDING.removeprefix("model.")
_COMPARED_BYTES = 4 << 20
"""Two tensors are compared in pieces of this size."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class WeightFiles:
    """All tensors of a checkpoint, by name.

    Args:
        wrapper: The architecture of the whole model that a decoder is the text part of; "": none.
            Tensors bear the names that they would have in the decoder alone.
        renamed: See `ModelSpec.renamed_tensors`.

    Attributes:
        others: The tensors that are not of the text part.

    Raises:
        CheckpointError: A file is missing, cut off or not what the index says.
    """

    def __init__(
        self, folder: Path, wrapper: str = "", renamed: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.folder = folder
        stem = "consolidated" if is_native(folder) else "model"
        self.single_file = f"{stem}.safetensors"
        self.index_file = f"{self.single_file}.index.json"
        self.tensors = self._read_index() if self._is_sharded() else read_header(self._single())
        self.tensors = {_own_name(tensor): _flat(tensor) for tensor in self.tensors.values()}
        for expression, name in renamed:
            rename = re.compile(expression).sub
            self.tensors = {rename(name, own): it for own, it in self.tensors.items()}
        if not wrapper and _is_bare(self.tensors):
            self.tensors = {_of_bare_model(name): it for name, it in self.tensors.items()}
        self.others: tuple[StoredTensor, ...] = ()
        if wrapper:
            named = [(text_name(name), tensor) for name, tensor in self.tensors.items()]
            self.tensors = {name: tensor for name, tensor in named if name is not None}
            self.others = tuple(tensor for name, tensor in named if name is None)

    def take_tower(self, tower: VisionSpec) -> None:
        """Makes `tensors` those of a vision tower alone, by the names that it has for them."""
        named = {tensor.name.removeprefix("model."): tensor for tensor in self.others}
        for expression, name in tower.renamed:
            named = {re.sub(expression, name, own): tensor for own, tensor in named.items()}
        prefixes = tower.prefixes
        self.tensors = {name: it for name, it in named.items() if name.startswith(prefixes)}
        self.others = ()

    def _is_sharded(self) -> bool:
        return (self.folder / self.index_file).is_file()

    def _single(self) -> Path:
        path = self.folder / self.single_file
        if not path.is_file():
            other = other_weights(self.folder)
            instead = f"{other}, but " if other else ""
            raise CheckpointError(
                self.folder,
                f"holds {instead}neither {self.single_file} nor {self.index_file}",
                "tandem reads safetensors only: load the model with the tool that wrote it, "
                "unquantised, and save it with transformers' save_pretrained, or check the folder",
            )
        return path

    def _read_index(self) -> dict[str, StoredTensor]:
        path = self.folder / self.index_file
        weight_map = read_json(path, _Index).weight_map
        tensors: dict[str, StoredTensor] = {}
        with telling_slow_reads(path):
            for shard in sorted(set(weight_map.values())):
                tensors.update(read_header(self._shard(shard)))
        for name, shard in weight_map.items():
            if name not in tensors or tensors[name].file.name != shard:
                raise CheckpointError(
                    self.folder / shard,
                    f"lacks {name}, which {self.index_file} promises",
                    DOWNLOAD_AGAIN,
                )
        return tensors

    def _shard(self, name: str) -> Path:
        path = self.folder / name
        if Path(name).name != name:
            raise CheckpointError(
                self.folder / self.index_file,
                f"names {name!r}, which is not a file of the folder",
                DOWNLOAD_AGAIN,
            )
        if not path.is_file():
            raise CheckpointError(
                path, f"is missing, but {self.index_file} names it", DOWNLOAD_AGAIN
            )
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

    def fingerprint(self, *, with_tower: bool = False, found: Iterable[FileDigests] = ()) -> bytes:
        """Returns 16 bytes that differ when names, shapes, stored dtypes or any bytes of the
        contents differ, of the text part or of all tensors. `found`: see `content_digests`. Raises
        `CheckpointError`."""
        tensors = dict(self.tensors)
        if with_tower:
            tensors |= {tensor.name: tensor for tensor in self.others}
        contents = content_digests(tensors.values(), found)
        digest = xxhash.xxh3_128()
        for name, tensor in sorted(tensors.items()):
            content = contents[tensor.name]
            digest.update(f"{name}|{tensor.dtype}|{tensor.shape}|{content}\n".encode())
        return digest.digest()


def _flat(tensor: StoredTensor) -> StoredTensor:
    """Returns a tensor with the bias of a router as a vector: ERNIE has it [1, E]."""
    is_row = tensor.name.endswith("e_score_correction_bias") and tensor.shape[:-1] == (1,)
    return replace(tensor, shape=tensor.shape[1:]) if is_row else tensor


def _is_bare(tensors: Collection[str]) -> bool:
    """Returns whether these are a decoder's tensors without the name of the decoder in front. Heads
    for drafts have such names, too, and `fc`."""
    return _BARE_EMBEDDING in tensors and not {EMBEDDING, "fc.weight"} & set(tensors)


def _of_bare_model(name: str) -> str:
    """Returns what a decoder calls a tensor that was saved without its head (`AutoModel`)."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def _own_name(tensor: StoredTensor) -> str:
    """Returns a tensor's name, with scales of whole tensors in FP8 called as most publishers call
    them: transformers has other names (Ministral 3)."""
    name = tensor.name
    if name.endswith(".activation_scale"):
        return name.removesuffix("activation_scale") + "input_scale"
    if name.endswith(".weight_scale_inv") and not tensor.shape:
        return name.removesuffix("_inv")
    return name

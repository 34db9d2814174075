"""Turns a GGUF file into a checkpoint's folder, once.

    config.json, tokenizer   from the metadata
    weights                  in bfloat16, or float16 where nothing in the file is quantised

Folders are kept in `tandem/gguf` of `HF_HOME` (`kept_folders`), by what a file holds: it may be
moved, copied and downloaded again. Torch-free.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from engine.models.files.content_digests import file_digest
from engine.models.files.kept_folders import STORE, kept_folder
from engine.models.gguf.gguf_file import GgufFile, Numbers
from engine.models.gguf.gguf_layouts import published, read_config
from engine.models.gguf.gguf_tokenizer import read_tokenizer

logger = logging.getLogger(__name__)

_SHARD_BYTES = 1 << 30
_STORED = {"bfloat16": "BF16", "float16": "F16"}
_ROUNDED_AT_ONCE = 1 << 18
"""This many numbers stay in a core's cache while they are rounded."""
_FORMAT = 1
"""Changes with what is written."""


def converted(path: Path, store: Path | None = None) -> Path:
    """Returns the folder of a GGUF file's checkpoint. Raises `CheckpointError`."""

    def write(folder: Path) -> None:
        logger.info("converting %s, which is done once, to %s", path, place)
        _write(GgufFile(path), folder)

    digest = f"{file_digest(path)}-{_FORMAT}"
    place = (store or STORE / "gguf") / digest / path.stem
    return kept_folder(place, write)


def _write(file: GgufFile, folder: Path) -> None:
    config = read_config(file)
    text, tokens = read_tokenizer(file)
    _write_weights(file, folder, config["torch_dtype"])
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens), encoding="utf-8")


def _write_weights(file: GgufFile, folder: Path, dtype: str) -> None:
    shard: dict[str, tuple[list[int], bytes]] = {}
    weight_map: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())):05}.safetensors"
        _write_shard(folder / name, shard, _STORED[dtype])
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for stored, numbers in file.tensors():
        named = published(file, stored, numbers)
        if named is not None:
            shard[named[0]] = list(named[1].shape), _rounded(named[1], dtype)
        if sum(len(data) for _, data in shard.values()) >= _SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_shard(path: Path, tensors: dict[str, tuple[list[int], bytes]], dtype: str) -> None:
    """Writes a file as `engine.models.files.stored_tensors` describes it: the library's own
    functions need torch for bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, data) in tensors.items():
        start, end = end, end + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, data in tensors.values():
            out.write(data)


def _rounded(numbers: Numbers, dtype: str) -> bytes:
    """Returns numbers in bfloat16 or float16, rounded to the nearest, ties to even."""
    if dtype == "float16":
        return numbers.astype(np.float16).tobytes()
    bits = np.ascontiguousarray(numbers).reshape(-1).view(np.uint32)
    found = np.empty(len(bits), dtype=np.uint16)
    for start in range(0, len(bits), _ROUNDED_AT_ONCE):
        part = bits[start : start + _ROUNDED_AT_ONCE]
        found[start : start + len(part)] = (part + (0x7FFF + ((part >> 16) & 1))) >> 16
    return found.tobytes()

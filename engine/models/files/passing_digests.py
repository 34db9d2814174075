"""Digests of a checkpoint's tensors, of the bytes that a rank reads anyway.

    1. `expect` the tensors of the checkpoint, before any is read
    2. reading threads hash each block while its bytes are in their core's cache: `took`. What goes
       to a GPU as it is they leave: `lies_in`
    3. `complete`: the GPU hashes what lies there, all of it in a few milliseconds; digests are of
       tensors that were read as a whole, in files that have not changed

Other tensors, such as those of which a rank reads a slice, the engine core reads for itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from engine.models.files.content_digests import (
    FileDigests,
    blocks_of,
    digest_of_blocks,
    known_digests,
    state_of,
)
from engine.models.files.stored_tensors import StoredTensor

Block = tuple[Path, int, int]
"""A file, and the first of its bytes and the one behind the last."""


class PassingDigests:
    """Follows the bytes of one load. `took` may be called by any thread."""

    def __init__(self) -> None:
        self._tensors: dict[Path, list[StoredTensor]] = {}
        self._states: dict[Path, tuple[int, ...]] = {}
        self._digests: dict[Block, bytes] = {}
        self._on_gpu: dict[Block, Tensor] = {}

    def expect(self, tensors: Iterable[StoredTensor]) -> None:
        """Follows these tensors, but those of files whose digests are known."""
        by_file: dict[Path, list[StoredTensor]] = {}
        for tensor in tensors:
            by_file.setdefault(tensor.file, []).append(tensor)
        for file, own in by_file.items():
            state = state_of(file)
            if not {tensor.name for tensor in own} <= known_digests(file, state).keys():
                self._tensors[file], self._states[file] = own, state

    def follows(self, file: Path) -> bool:
        return file in self._tensors

    def took(self, block: Block, digest: bytes) -> None:
        """Takes the digest of a block of a file that it follows."""
        self._digests[block] = digest

    def lies_in(self, block: Block, memory: Tensor) -> None:
        """Remembers a block whose bytes are those of `memory` [rows, ...], of any dtype, on a GPU,
        unchanged until all is `complete`. Blocks of files that it does not follow are left."""
        if self.follows(block[0]):
            self._on_gpu[block] = memory

    def complete(self) -> tuple[FileDigests, ...]:
        """Returns all that is whole, of files that are as they were."""
        if self._on_gpu:
            # Triton, which machines without a GPU may lack.
            from tandem_kernels.checksums.xxh3 import xxh3_128

            hashed = xxh3_128(list(self._on_gpu.values()))
            self._digests |= zip(self._on_gpu, hashed, strict=True)
            self._on_gpu.clear()
        return tuple(
            FileDigests(str(file.resolve()), self._states[file], self._whole(own))
            for file, own in self._tensors.items()
            if state_of(file) == self._states[file]
        )

    def _whole(self, tensors: list[StoredTensor]) -> dict[str, str]:
        found = {}
        for tensor in tensors:
            blocks = [self._digests.get((tensor.file, *block), b"") for block in blocks_of(tensor)]
            if all(blocks):
                found[tensor.name] = digest_of_blocks(blocks)
        return found

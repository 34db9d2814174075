"""Images of a request: where they stand in its prompt, and what a vision tower is given of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

DIGEST_BYTES = 32


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """One image in a prompt, as every node sees it that works on the request.

    Attributes:
        offset: The first of its tokens, counted from the prompt's beginning.
        rows, columns: Of its tokens.
        digest: SHA-256 of what the tower is given, so that equal digests mean equal KV.
        row_ends: Tokens behind each row that end it, and have embeddings of text.
        joins: It goes on with the video that the span before it is of, without text between them:
            rows and columns have positions from the same start.
        time: How far its first position is behind that start.
        first: The first of its embeddings among those of all pairs of frames that the tower is
            given together; `beside`: those of the others.
    """

    offset: int
    rows: int
    columns: int
    digest: bytes
    row_ends: int = 0
    joins: bool = False
    time: int = 0
    first: int = 0
    beside: int = 0

    @property
    def num_embeddings(self) -> int:
        """Returns its tokens that the tower makes."""
        return self.rows * self.columns

    @property
    def num_encoded(self) -> int:
        """Returns the tokens that the tower makes at once with it."""
        return self.num_embeddings + self.beside

    @property
    def num_tokens(self) -> int:
        return self.rows * (self.columns + self.row_ends)

    @property
    def end(self) -> int:
        """Returns the first token behind it."""
        return self.offset + self.num_tokens


class ImagePixels(msgspec.Struct, frozen=True, array_like=True):
    """Holds what a vision tower computes an image's embeddings from.

    Attributes:
        rows, columns: Of tokens; of each of several pairs of frames.
        patches: [patches, 3, frames, patch_size, patch_size] uint8, resized and not yet
            normalised. The patches of a token lie together, row by row; so do tokens. An image has
            one frame; a pair of different frames of a video has as many as the tower takes. Pairs
            that see each other follow each other, with all of their frames.
    """

    digest: bytes
    rows: int
    columns: int
    patches: bytes


class EncoderWork(msgspec.Struct, frozen=True, array_like=True):
    """Tells what a step does with images before its forward pass.

    Attributes:
        dropped: Digests whose embeddings are not needed any more. They go first.
        encoded: Images whose embeddings are computed and kept.
    """

    dropped: tuple[bytes, ...] = ()
    encoded: tuple[ImagePixels, ...] = ()


def position_delta(images: Sequence[ImageSpan]) -> int:
    """Returns what is added to the index of a token behind all `images` to get its position: an
    image takes as many positions as its longer side has tokens, a video as many as the longest of
    its sides and its time."""
    found = longest = 0
    for image in images:
        if not image.joins:
            found += longest
            longest = 0
        longest = max(longest, image.time + 1, image.rows, image.columns)
        found -= image.num_tokens
    return found + longest


def image_digest(rows: int, columns: int, patches: bytes) -> bytes:
    """Returns the digest of what a tower is given: equal exactly for equal embeddings."""
    head = b"tandem/image/1\0%d,%d\0" % (rows, columns)
    return hashlib.sha256(head + patches).digest()

"""Decides which images a step encodes, and keeps account of the embeddings that workers hold.

Life of an image's embeddings:

    a chunk of a prompt reaches the image
        held already                        the request takes a reference
        budget and room for it              encoded in this step, before its tokens are computed
        else                                the chunk ends before the image, and waits
    the last of its tokens is scheduled     the reference is given up, though the image may come
                                            again in the prompt: none that waits for room keeps
                                            what others, or itself, wait for
    nothing refers to them                   kept while there is room, for the next who sends it;
                                            the one unused for longest goes first

Embeddings are known by the image's digest. A step that drops some and one that has read them run in
the order in which they were scheduled, so nothing has to wait for a result. A step drops before it
computes, so what it reads itself stays until the next.
"""

from __future__ import annotations

from itertools import pairwise

from engine.contracts.outputs import ImageStats
from engine.contracts.request import Request
from engine.images.image_input import EncoderWork, ImagePixels, ImageSpan
from engine.images.image_limits import ImageLimits


class ImageEncoding:
    """The scheduler's account of one engine's encoder and of its cache. `is_on`: there is one.
    `step_tokens`: of a step at most."""

    def __init__(self, limits: ImageLimits) -> None:
        self._budget, self._capacity = limits.budget, limits.capacity
        self.is_on = limits.has_encoder
        self.step_tokens = limits.step_tokens
        self._are_whole = limits.are_whole
        self._num_queries = self._num_hits = self._num_encoded_tokens = 0
        self._sizes: dict[bytes, int] = {}  # [digest], least recently used first
        self._users: dict[bytes, set[str]] = {}  # [digest] -> request ids
        self._of_request: dict[str, set[bytes]] = {}
        self._held_tokens = 0
        self._left = self._budget
        self._dropped: list[bytes] = []
        self._encoded: list[ImagePixels] = []
        self._read: set[bytes] = set()
        """Digests of what the step that is put together encodes or reads."""

    def limit(self, request: Request, first: int, count: int, most: int = 0) -> int:
        """Returns how many of the request's tokens `[first, first + count)` the step can compute:
        those before the first image whose embeddings it can not have. Takes references to all
        others, and lets the step encode those that are new.

        An image that is computed at once is not cut: the tokens end before it, or if it is the
        first of them behind it, where the step can take `most`, whatever it means to.
        """
        for image in request.spec.images:
            if image.end <= first:
                continue
            if image.offset >= first + count:
                break
            if self._are_whole and image.end > first + count:
                before, whole = image.offset - first, image.end - first
                if before > 0 or whole > most:
                    return max(0, before)
                count = whole
            if not self._take(request, image):
                return max(0, image.offset - first)
        return count

    def passed(self, request: Request, end: int) -> None:
        """Gives up references to all images but one that the chunk before `end` has cut, or whose
        next pair of frames is behind it."""
        held = self._of_request.get(request.request_id)
        if held is None:
            return
        images = request.spec.images
        needed = {image.digest for image in images if image.offset < end < image.end}
        needed |= {
            image.digest
            for image, following in pairwise(images)
            if image.end <= end <= following.offset and following.first > image.first
        }
        for digest in held - needed:
            self._give_up(request.request_id, digest)

    def leave(self, request_id: str) -> None:
        """Gives up all references of a request that ended or was preempted."""
        for digest in list(self._of_request.get(request_id, ())):
            self._give_up(request_id, digest)

    def holds(self, request_id: str) -> bool:
        """Returns whether embeddings are kept for a request."""
        return request_id in self._of_request

    def take_work(self) -> EncoderWork | None:
        """Returns what the step that goes out does with images, and begins the next."""
        self._left = self._budget
        self._read.clear()
        if not self._dropped and not self._encoded:
            return None
        work = EncoderWork(tuple(self._dropped), tuple(self._encoded))
        self._dropped, self._encoded = [], []
        return work

    def stats(self) -> ImageStats:
        """Returns what became of images so far."""
        return ImageStats(self._num_queries, self._num_hits, self._num_encoded_tokens)

    def leftovers(self) -> list[str]:
        """Names everything that should not be there when no request is."""
        return [f"image embeddings held by {name}" for name in self._of_request]

    @property
    def num_held_tokens(self) -> int:
        """Returns the tokens whose embeddings workers hold."""
        return self._held_tokens

    def _take(self, request: Request, image: ImageSpan) -> bool:
        """Returns whether the request has the image's embeddings in this step."""
        digest, name = image.digest, request.request_id
        is_here = digest in self._sizes
        if not is_here and not self._encode(request, image):
            return False
        self._sizes[digest] = self._sizes.pop(digest)
        self._read.add(digest)
        if name in self._users[digest]:
            return True
        self._num_queries += 1
        self._num_hits += is_here
        self._users[digest].add(name)
        self._of_request.setdefault(name, set()).add(digest)
        return True

    def _encode(self, request: Request, image: ImageSpan) -> bool:
        size = image.num_encoded
        if size > self._left or not self._make_room(size):
            return False
        self._encoded.append(request.pixels[image.digest])
        self._left -= size
        self._held_tokens += size
        self._sizes[image.digest] = size
        self._users[image.digest] = set()
        self._num_encoded_tokens += size
        return True

    def _make_room(self, size: int) -> bool:
        """Drops embeddings that nothing refers to, nor reads in this step, until `size` tokens fit,
        if they then do."""
        needed = self._held_tokens + size - self._capacity
        dropped: list[bytes] = []
        for digest, held in self._sizes.items():
            if needed <= 0:
                break
            if not self._users[digest] and digest not in self._read:
                dropped.append(digest)
                needed -= held
        if needed > 0:
            return False
        for digest in dropped:
            self._held_tokens -= self._sizes.pop(digest)
            del self._users[digest]
        self._dropped += dropped
        return True

    def _give_up(self, request_id: str, digest: bytes) -> None:
        self._users[digest].discard(request_id)
        held = self._of_request[request_id]
        held.discard(digest)
        if not held:
            del self._of_request[request_id]

"""Processes that preprocess images beside the event loop.

    process(data) ──▶ a thread that is free ──▶ its process ──▶ patches
                          │ too slow, or it ended: killed; the next image starts another

Each thread has a process of its own, started with its first image. A picture that takes too long or
makes its process crash costs nobody else anything.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from decode_node.errors import Overloaded
from decode_node.images.image_child import (
    ImageChildConfig,
    ImageResult,
    receive_frame,
    send_frame,
)
from decode_node.images.preprocess import ImageError
from edge.logs.setup import log_style
from engine.images.image_input import ImagePixels
from engine.images.vision_spec import PixelSpec
from host.child_process import ChildProcess

_START_S = 30.0
"""Seconds that the first answer of a process may take more than any other."""
_MAX_WAITING = 256
"""Images that wait for a process at most."""
_decode = msgspec.msgpack.Decoder(ImageResult).decode


class ImagePool:
    """Preprocesses images for one model.

    Args:
        size: Processes at most.
        max_pixels: Of an image as it is sent.
        timeout_s: Seconds that one image may take.
    """

    def __init__(
        self,
        pixels: PixelSpec,
        *,
        size: int,
        max_pixels: int,
        timeout_s: float,
    ) -> None:
        self._pixels = pixels
        self._max_pixels = max_pixels
        self._timeout_s = timeout_s
        self._max_open = size + _MAX_WAITING
        self._num_open = 0
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="images")
        self._local = threading.local()
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._is_closed = False

    async def process(self, data: bytes) -> ImagePixels:
        """Returns an encoded image's patches. Raises `ImageError`, `Overloaded`."""
        if self._num_open >= self._max_open:
            raise Overloaded("too many images at once; try it again in a moment")
        self._num_open += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._work, data)
        finally:
            self._num_open -= 1

    def close(self) -> None:
        """Ends all processes. Idempotent."""
        with self._lock:
            self._is_closed = True
            links, self._links = self._links, set()
        for link in links:
            link.kill()
        self._threads.shutdown(cancel_futures=True)

    def _work(self, data: bytes) -> ImagePixels:
        link: _Link | None = getattr(self._local, "link", None)
        is_new = link is None
        if link is None:
            link = self._local.link = self._start()
        try:
            result = link.ask(data, self._timeout_s + (_START_S if is_new else 0.0))
        except (OSError, EOFError) as error:
            self._local.link = None
            self._drop(link)
            if isinstance(error, TimeoutError):
                raise ImageError(
                    f"took longer than {self._timeout_s:g} s to decode; send a smaller one"
                ) from None
            raise ImageError("made its decoder end; send it in another format") from None
        if result.image is None:
            raise ImageError(result.error)
        return result.image

    def _start(self) -> _Link:
        with self._lock:
            if self._is_closed:
                raise ImageError("came while the node stops; send it again")
            link = _Link(self._config)
            self._links.add(link)
            return link

    def _config(self, fd: int) -> ImageChildConfig:
        return ImageChildConfig(
            fd=fd, pixels=self._pixels, max_pixels=self._max_pixels, log=log_style()
        )

    def _drop(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)
        link.kill()


class _Link:
    """A process and the socket to it."""

    def __init__(self, config: Callable[[int], ImageChildConfig]) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = ChildProcess.start(
                "decode_node.images.image_child", config(fd), "image decoder", pass_fds=(fd,)
            )

    def ask(self, data: bytes, timeout_s: float) -> ImageResult:
        """Has one image preprocessed. Raises `TimeoutError`, `OSError`, `EOFError`."""
        self._ours.settimeout(timeout_s)
        send_frame(self._ours, data)
        return _decode(receive_frame(self._ours))

    def kill(self) -> None:
        self._process.stop(0.0)
        self._ours.close()

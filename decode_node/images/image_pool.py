"""Processes that preprocess images and videos beside the event loop.

    process(task, line) ──its turn──▶ a thread that is free ──▶ its process ──▶ patches
                          │ too slow, or its process ended: killed; the next image starts another

1. a thread starts its process with its first image, whose time begins when the process is ready
2. the requests that have images take turns (`image_turns`)
3. a process that ends with an image in hand: the image is tried once more, on a new one. If that
   ends too, it is the image's fault, or none's where something killed it
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from decode_node.errors import Overloaded, Unavailable
from decode_node.images.image_child import (
    ImageChildConfig,
    ImageResult,
    ImageTask,
    receive_frame,
    send_frame,
)
from decode_node.images.image_turns import ImageLine, ImageTurns
from decode_node.images.media_options import Prepared
from decode_node.images.preprocess import ImageError
from decode_node.images.videos.preprocess import VideoPixels
from edge.logs.setup import log_style
from engine.images.image_input import ImagePixels
from engine.images.video_spec import VideoSpec
from engine.images.vision_spec import PixelSpec
from host.child_process import ChildProcess

_START_S = 30.0
"""Seconds that a new process may take until it is ready."""
_ENDING_S = 1.0
_TRIES = 2
_KILLED = -signal.SIGKILL, -signal.SIGTERM
"""How processes end that another ends, such as the kernel where memory is short."""
_MAX_WAITING = 256
"""Images that wait for a process at most."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ImageResult).decode


class ImagePool:
    """Preprocesses images for one model.

    Args:
        size: Processes at most.
        max_pixels: Of an image or a frame as it is sent.
        timeout_s: Seconds that one image may take.
        video: How videos are prepared; None: there are none.
        video_timeout_s: Seconds that one video may take.

    Attributes:
        prepared: How images and videos are prepared whose request has no say.
    """

    def __init__(
        self,
        pixels: PixelSpec,
        *,
        size: int,
        max_pixels: int,
        timeout_s: float,
        video: VideoSpec | None = None,
        video_timeout_s: float = 0.0,
    ) -> None:
        self.prepared = Prepared(pixels, video)
        self._max_pixels = max_pixels
        self._timeout_s = timeout_s
        self._video_timeout_s = video_timeout_s
        self._max_open = size + _MAX_WAITING
        self._num_open = 0
        self._turns = ImageTurns(size)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="images")
        self._local = threading.local()
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._is_closed = False

    @property
    def takes_videos(self) -> bool:
        return self.prepared.video is not None

    async def process(self, task: ImageTask, line: ImageLine) -> ImagePixels | VideoPixels:
        """Returns the patches of an encoded image or video, which is one of `line`. Raises
        `ImageError`, `Overloaded`, `Unavailable`."""
        if self._num_open >= self._max_open:
            raise Overloaded("too many images at once; try it again in a moment")
        self._num_open += 1
        try:
            end = await self._turns.wait(line)
            loop = asyncio.get_running_loop()
            working = loop.run_in_executor(self._threads, self._work, task)
            # A client that leaves stops no thread.
            working.add_done_callback(lambda done: end())
            return await asyncio.shield(working)
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

    def _work(self, task: ImageTask) -> ImagePixels | VideoPixels:
        exit_code = None
        timeout_s = self._video_timeout_s if task.is_video else self._timeout_s
        for _ in range(_TRIES):
            link = self._link()
            try:
                result = link.ask(task, timeout_s)
            except TimeoutError:
                self._drop(link)
                raise ImageError(
                    f"took longer than {timeout_s:g} s to decode; send a smaller one"
                ) from None
            except (OSError, EOFError):
                exit_code = link.exit_code()
                self._drop(link)
                continue
            found = result.image or result.video
            if found is None:
                raise ImageError(result.error)
            return found
        if exit_code in _KILLED:
            raise Unavailable("the processes that decode images are killed here; try it again")
        raise ImageError("made its decoder end; send it in another format")

    def _link(self) -> _Link:
        """Returns this thread's process, which is ready. Raises `Unavailable`."""
        link: _Link | None = getattr(self._local, "link", None)
        if link is None:
            link = self._start()
            try:
                link.wait_ready()
            except (OSError, EOFError):
                self._drop(link)
                raise Unavailable("no process that decodes images starts; try it again") from None
            self._local.link = link
        return link

    def _start(self) -> _Link:
        with self._lock:
            if self._is_closed:
                raise Unavailable("this node is stopping; send the request to another")
            link = _Link(self._config)
            self._links.add(link)
            return link

    def _config(self, fd: int) -> ImageChildConfig:
        return ImageChildConfig(
            fd=fd,
            pixels=self.prepared.pixels,
            video=self.prepared.video,
            max_pixels=self._max_pixels,
            log=log_style(),
        )

    def _drop(self, link: _Link) -> None:
        self._local.link = None
        with self._lock:
            self._links.discard(link)
        link.kill()


class _Link:
    """A process and the socket to it."""

    is_ready = False

    def __init__(self, config: Callable[[int], ImageChildConfig]) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = ChildProcess.start(
                "decode_node.images.image_child", config(fd), "image decoder", pass_fds=(fd,)
            )

    def wait_ready(self) -> None:
        """Waits for its first frame. Raises `TimeoutError`, `OSError`, `EOFError`."""
        self._ours.settimeout(_START_S)
        receive_frame(self._ours)
        self.is_ready = True

    def ask(self, task: ImageTask, timeout_s: float) -> ImageResult:
        """Has one image or video preprocessed. Raises `TimeoutError`, `OSError`, `EOFError`."""
        self._ours.settimeout(timeout_s)
        send_frame(self._ours, _encode(task))
        return _decode(receive_frame(self._ours))

    def exit_code(self) -> int | None:
        """Returns how it has ended, of which its socket tells a moment sooner; None if it has
        not."""
        self._process.wait(_ENDING_S)
        return self._process.exit_code

    def kill(self) -> None:
        self._process.stop(0.0)
        self._ours.close()

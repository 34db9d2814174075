"""A process that preprocesses images and videos: one at a time, within limits of memory.

Frames on its socket: eight bytes of length, then MessagePack. The first one is empty: it is ready.
It answers each image in order, and ends with its parent, or when the socket closes.
"""

from __future__ import annotations

import resource
import socket
import struct

import msgspec

from decode_node.images.preprocess import ImageError, preprocess
from decode_node.images.videos.preprocess import VideoPixels, preprocess_video
from edge.logs.setup import LogStyle, setup_logging
from engine.images.image_input import ImagePixels
from engine.images.video_spec import VideoSpec
from engine.images.vision_spec import PixelSpec
from host.child_process import read_config

_LENGTH = struct.Struct("<Q")
_MEMORY = 4 << 30
"""Bytes of address space. Libraries take about a tenth of it."""


class ImageChildConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that the process is given at its start. `fd`: its end of the socket; `video`: how videos
    are prepared, None: not at all."""

    fd: int
    pixels: PixelSpec
    video: VideoSpec | None
    max_pixels: int
    log: LogStyle


class ImageTask(msgspec.Struct, array_like=True):
    """An image, or a video: one file, or pictures that follow each other. `pixels`, `video`: how it
    is prepared, where its request has a say; None: as all others."""

    data: list[bytes]
    is_video: bool = False
    pixels: PixelSpec | None = None
    video: VideoSpec | None = None


class ImageResult(msgspec.Struct, array_like=True):
    """Holds what was made of a task, or why it was not."""

    error: str = ""
    image: ImagePixels | None = None
    video: VideoPixels | None = None


_decode = msgspec.msgpack.Decoder(ImageTask).decode


def send_frame(connection: socket.socket, frame: bytes) -> None:
    """Sends one message."""
    connection.sendall(_LENGTH.pack(len(frame)))
    connection.sendall(frame)


def receive_frame(connection: socket.socket) -> bytes:
    """Returns the next message. Raises `EOFError`, `OSError`."""
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    return bytes(_receive(connection, length))


def _receive(connection: socket.socket, count: int) -> bytearray:
    found = bytearray(count)
    view = memoryview(found)
    while view:
        got = connection.recv_into(view)
        if got == 0:
            raise EOFError("the other end has closed")
        view = view[got:]
    return found


def main() -> None:
    """Preprocesses what comes until nothing sends any more."""
    config = read_config(ImageChildConfig)
    setup_logging(config.log, "image decoder", is_child=True)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    with socket.socket(fileno=config.fd) as connection:
        send_frame(connection, b"")
        while True:
            try:
                data = receive_frame(connection)
            except (EOFError, OSError):
                return
            try:
                result = _result(_decode(data), config)
            except ImageError as error:
                result = ImageResult(str(error))
            except MemoryError:
                result = ImageResult("takes too much memory; send a smaller one")
            send_frame(connection, msgspec.msgpack.encode(result))


def _result(task: ImageTask, config: ImageChildConfig) -> ImageResult:
    pixels, video = task.pixels or config.pixels, task.video or config.video
    if not task.is_video:
        return ImageResult(image=preprocess(task.data[0], pixels, config.max_pixels))
    assert video is not None
    made = preprocess_video(task.data, pixels, video, config.max_pixels)
    return ImageResult(video=made)

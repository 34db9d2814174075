"""A reader in a process of its own, for the tests: answers with what it read."""

from __future__ import annotations

import hashlib
import time

import msgspec
import zmq

from engine.executor.queues.message_queue import MessageQueueHandle, MessageQueueReader
from host.child_process import read_config
from host.sockets.local_socket import connect_socket


class ReaderConfig(msgspec.Struct):
    handle: MessageQueueHandle
    reader: int
    reply_address: str
    delay_s: float = 0.0


def main() -> None:
    """Replies with a digest of each message, and with its own CPU seconds; ends at b"end"."""
    config = read_config(ReaderConfig)
    context = zmq.Context()
    replies = connect_socket(context, zmq.PUSH, config.reply_address)
    queue = MessageQueueReader(context, config.handle, config.reader, lambda: None)
    while (message := queue.dequeue()) != b"end":
        received_at = time.monotonic()
        if config.delay_s:
            time.sleep(config.delay_s)
        reply = (config.reader, hashlib.sha256(message).digest(), received_at, time.process_time())
        replies.send(msgspec.msgpack.encode(reply))
    queue.close()
    context.destroy()


if __name__ == "__main__":
    main()

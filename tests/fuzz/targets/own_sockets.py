"""Sockets between the processes of a node, which any process of the same user may write to: what is
no message is dropped and counted, and the next one is read."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq
from hypothesis import strategies as st

from engine.contracts.messages import FromEngineCore, ToEngineCore
from engine.executor.worker_messages import WorkerCommand, WorkerReply
from host.sockets.message_reader import MessageReader
from kv_transfer.metadata import ProcessMessage, TransferCommand
from tests.fuzz.damage import JSON, altered, damaged
from tests.fuzz.target import Fault, Target

_KINDS: list[Any] = [
    ToEngineCore, FromEngineCore, WorkerCommand, WorkerReply, TransferCommand, ProcessMessage,
]  # fmt: skip


def _tags(kind: Any) -> list[str]:
    """Returns the names of all messages of a kind."""
    return [str(one.__struct_config__.tag) for one in kind.__args__]


_ALL_TAGS = sorted({tag for kind in _KINDS for tag in _tags(kind)})


@st.composite
def _messages(draw: st.DrawFn) -> bytes:
    """Draws a byte for the kind, then what may look like one of its messages."""
    number = draw(st.integers(0, len(_KINDS) - 1))
    tag = draw(st.sampled_from(_tags(_KINDS[number])) | st.sampled_from(_ALL_TAGS))
    fields = draw(st.lists(JSON, max_size=6))
    body: Any = [tag, *fields]
    if draw(st.booleans()):
        names = st.sampled_from(["request_id", "spec", "outputs", "error", "name", "group", "1"])
        body = {"type": tag, **draw(st.dictionaries(names, JSON, max_size=4))}
    try:
        data = msgspec.msgpack.encode(draw(altered(body, 2)))
    except (OverflowError, ValueError, UnicodeEncodeError):
        data = b"\xc1"
    depth = draw(st.sampled_from([0, 0, 0, 5_000]))
    return bytes([number]) + draw(damaged(st.just(b"\x91" * depth + data), 3))


class _Socket:
    """Gives one message, and then an empty one, which is none."""

    def __init__(self, *messages: bytes) -> None:
        self._messages = list(messages)

    def recv(self, flags: int) -> bytes:
        if not self._messages:
            raise zmq.Again
        return self._messages.pop(0)


def _check(data: bytes) -> None:
    if not data:
        return
    reader: MessageReader[Any] = MessageReader(
        _Socket(data[1:], b""),
        _KINDS[data[0] % len(_KINDS)],
        "nobody",  # type: ignore[arg-type]
    )
    found = [reader.next(), reader.next()]
    if sum(one is not None for one in found) + reader.num_dropped != 2:
        raise Fault("a message was neither read nor counted")


TARGETS = [Target(name="own_sockets", inputs=_messages(), check=_check, examples=500)]

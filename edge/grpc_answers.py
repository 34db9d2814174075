"""Tells answers over gRPC from bytes that are no message, and asks twice where a connection breaks.

A peer that is broken, of another release or not ours may answer with anything. gRPC itself logs a
traceback for an answer that it cannot read, and gives None to the caller.

    stub = PrefixesStub(QuietChannel(channel))      logs nothing; takes bytes as a request, too
    reply = readable(await stub.Offer(request))     raises `GarbledAnswer`
    words_of(error)                                 what it says of a call that it has ended
    asked_twice(service, methods)                   options of a channel: these may be made again
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError

from edge.printable import printable

SHORT_CALL_S = 10.0
"""Seconds that routers wait for the answer to a short call to a node, besides what it asks for."""
_MAX_WORDS = 1000
_Message = TypeVar("_Message")
_Read: TypeAlias = Callable[[bytes], _Message]
_Write: TypeAlias = Callable[[Any], bytes]


class GarbledAnswer(Exception):
    """A peer answered with bytes that are no message; says what to look at."""

    def __init__(self) -> None:
        super().__init__(
            "it answered with bytes that are no message; see that a node of the same release "
            "serves at this address"
        )


class QuietChannel:
    """Makes the calls of stubs on `channel`. Each answer has to be `readable`. What opens a stream
    may be a message or its bytes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def unary_unary(
        self, method: str, *, response_deserializer: _Read[Any], **options: Any
    ) -> grpc.aio.UnaryUnaryMultiCallable[Any, Any]:
        read = _or_none(response_deserializer)
        return self._channel.unary_unary(method, response_deserializer=read, **options)

    def unary_stream(
        self,
        method: str,
        *,
        request_serializer: _Write,
        response_deserializer: _Read[Any],
        **options: Any,
    ) -> grpc.aio.UnaryStreamMultiCallable[Any, Any]:
        read, write = _or_none(response_deserializer), _unless_bytes(request_serializer)
        return self._channel.unary_stream(
            method, request_serializer=write, response_deserializer=read, **options
        )


def readable(answer: _Message | None) -> _Message:
    """Returns an answer that came over a `QuietChannel`. Raises `GarbledAnswer`."""
    if answer is None:
        raise GarbledAnswer
    return answer


def asked_twice(service: str, methods: Iterable[str]) -> tuple[tuple[str, Any], ...]:
    """Returns options of a channel on which calls of these methods, whose second call finds what
    the first has done, are made once more when their connection breaks: on another one, and within
    their own time."""
    policy = {
        "maxAttempts": 2,
        "initialBackoff": "0.05s",
        "maxBackoff": "0.05s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    names = [{"service": service, "method": method} for method in methods]
    config = {"methodConfig": [{"name": names, "retryPolicy": policy}]}
    return (
        ("grpc.service_config", json.dumps(config)),
        ("grpc.service_config_disable_resolution", 1),
    )


def words_of(error: grpc.aio.AioRpcError) -> str:
    """Returns why a peer ended a call, in as many of its own words as others may see."""
    said = error.details() or "it does not say why"
    return f"{error.code().name}: {printable(said[:_MAX_WORDS])}"


def _unless_bytes(write: _Write) -> _Write:
    return lambda request: request if isinstance(request, bytes) else write(request)


def _or_none(read: _Read[_Message]) -> _Read[_Message | None]:
    def read_quietly(content: bytes) -> _Message | None:
        try:
            return read(content)
        except DecodeError:
            return None

    return read_quietly

"""Serves nothing over gRPC but bytes that are no message, and reads how that was logged."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

GARBAGE = b"\xff"


class _Garbled(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        return grpc.unary_unary_rpc_method_handler(self._answer)

    async def _answer(self, request: bytes, context: object) -> bytes:
        return GARBAGE


@asynccontextmanager
async def garbled_server() -> AsyncIterator[str]:
    """Yields the address of what answers every unary call with garbage."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Garbled(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def only_warning(caplog: pytest.LogCaptureFixture) -> str:
    """Returns the one warning, of one line, that was logged. There is no traceback."""
    [record] = [one for one in caplog.records if one.levelno >= logging.WARNING]
    text = record.getMessage()
    assert record.levelno == logging.WARNING and record.exc_info is None and "\n" not in text
    caplog.clear()
    return text

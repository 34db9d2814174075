"""Another process of the same user writes to every socket of a running engine: nothing happens."""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec
import zmq

from engine.frontend.async_llm import AsyncLLM
from host.child_process import ipc_address
from host.sockets.local_socket import connect_socket
from kv_transfer.config import KVTransferConfig
from kv_transfer.metadata import ProcessReport
from tests.engine.core.tiny_engine import make_request, tiny_config

TIMEOUT_S = 60.0
JUNK = (
    b"",
    b"not a message",
    b"\xff" * 100_000,
    msgspec.msgpack.encode({"type": "outputs", "outputs": 7}),
    msgspec.msgpack.encode(["step", 7, "x"]),
    msgspec.msgpack.encode(["failed", "\ud800".encode("utf-8", "surrogatepass")]),
    msgspec.msgpack.encode(ProcessReport(99)),
)


async def tokens(llm: AsyncLLM, name: str) -> list[int]:
    found: list[int] = []
    async with asyncio.timeout(TIMEOUT_S):
        async for output in llm.generate(make_request(name, 5, max_tokens=6)):
            found += output.token_ids
    return found


def addresses(llm: AsyncLLM) -> dict[str, int]:
    """Lists all sockets that listen, with a kind of socket that may connect there."""
    config = llm.config
    names = [f"{config.epoch:x}-{name}" for name in ("replies", "steps0")]
    names += ["kv-events", "kv-commands-0-0", "kv-steps-0-0"]
    found = {ipc_address(config.engine_id, name): zmq.PUSH for name in names}
    return {**found, ipc_address(config.engine_id, f"{config.epoch:x}-core"): zmq.PAIR}


async def test_junk_is_dropped_and_counted() -> None:
    transfer = KVTransferConfig(kv_role="kv_producer", num_processes=1, staging_bytes=4 << 20)
    llm = await AsyncLLM.start(dataclasses.replace(tiny_config(), kv_transfer=transfer))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        expected = await tokens(llm, "before")
        transfer_pids = llm.ready.transfer_pids
        sockets = [connect_socket(context, kind, name) for name, kind in addresses(llm).items()]
        for socket in sockets:
            for junk in JUNK:
                socket.send(junk, zmq.NOBLOCK)
        async with asyncio.timeout(TIMEOUT_S):
            # Replies, and of the data plane events, commands and steps.
            while llm.stats.num_dropped_messages < len(JUNK) or llm.stats.kv_transfer[
                "dropped_messages"
            ] < 3 * len(JUNK):
                assert await tokens(llm, "meanwhile") == expected
        assert not llm.is_dead
        assert llm.stats.kv_transfer["process_restarts"] == 0
        assert llm.ready.transfer_pids == transfer_pids
        for socket in sockets:
            socket.close(linger=0)
    finally:
        await llm.shutdown()
        context.term()

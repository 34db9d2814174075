"""A decode node's process that is killed in the middle of a batch: each line is answered once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.router.batches.conftest import FAST, client_of
from tests.router.batches.node import line
from tests.router.batches.test_batches import content, ended, make
from tests.router.cluster import TIMEOUT_S, Cluster

NUM_LINES = 40

_NODE = """
import asyncio, sys
from tests.router.batches.node import ChatNode
from tests.router.fakes import FakeDecodeNode

async def main():
    node = ChatNode()
    async def slow(request):
        print("asked", flush=True)
        await asyncio.sleep(0.05)
        return await node(request)
    served = await FakeDecodeNode(sys.argv[1], slow).start()
    print(served.entry, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def node_process(name: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Yields a process that answers as a decode node, and its entry."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _NODE, name, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_lines_of_a_killed_node_are_answered_by_another(
    cluster: Cluster, store: Path
) -> None:
    async with node_process("d1") as (killed, one), node_process("d2") as (_, other):
        router = await cluster.router(
            decode=f"{one},{other}", batch_store=f"sqlite:///{store}", no_node_wait_s=5.0, **FAST
        )
        await router.wait_usable(decode=2, prefill=0)
        async with client_of(router) as client:
            names = [f"t{i}" for i in range(NUM_LINES)]
            batch = await make(client, [line(name) for name in names])
            assert killed.stdout is not None
            async with asyncio.timeout(TIMEOUT_S):
                for _ in range(3):
                    assert await killed.stdout.readline() == b"asked\n"
            killed.kill()
            await killed.wait()
            batch = await ended(client, batch)
            counts = batch.request_counts
            assert batch.status == "completed" and counts is not None
            assert (counts.completed, counts.failed) == (NUM_LINES, 0)
            assert set(await content(client, batch.output_file_id)) == set(names)

"""Routers share one PostgreSQL: a batch goes on while it restarts, and each line is there once."""

from __future__ import annotations

import asyncio

from tests.postgres_server import needs_postgres, run_postgres
from tests.router.batches.conftest import FAST, client_of
from tests.router.batches.node import ChatNode, line
from tests.router.batches.test_batches import content, ended, make
from tests.router.cluster import Cluster, eventually
from tests.router.fakes import FakeDecodeNode

NUM_LINES = 60


@needs_postgres
async def test_two_routers_run_batches_from_a_database_that_may_restart(
    cluster: Cluster, decode: FakeDecodeNode, node: ChatNode
) -> None:
    async with run_postgres() as server:
        routers = await asyncio.gather(
            *(cluster.router(decode, batch_store=server.url, **FAST) for _ in range(2))
        )
        one, other = map(client_of, routers)
        async with one, other:
            names = [f"t{i}" for i in range(NUM_LINES)]
            batches = await asyncio.gather(
                *(make(client, [line(n) for n in names]) for client in (one, other))
            )
            for client, batch in zip((other, one), batches, strict=True):
                batch = await ended(client, batch)
                assert batch.status == "completed"
                assert set(await content(client, batch.output_file_id)) == set(names)
            node.may_go.clear()
            batch = await make(one, [line(n) for n in names])
            await eventually(lambda: node.num_open > 0)
            cancelled = await make(other, [line("late")])
            await other.batches.cancel(cancelled.id)
            await server.stop()
            node.may_go.set()
            await asyncio.sleep(0.3)
            await server.start()
            batch = await ended(other, batch)
            assert batch.status == "completed"
            assert set(await content(other, batch.output_file_id)) == set(names)
            listed = [found.id async for found in await one.batches.list(limit=2)]
            assert len(listed) == 4 and batch.id in listed
            cancelled = await ended(one, cancelled)
            assert cancelled.status == "cancelled"
            await one.files.delete(batch.input_file_id)
            assert batch.input_file_id not in {f.id async for f in await other.files.list()}

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from tests.router.batches.node import ChatNode
from tests.router.cluster import Cluster, RunningRouter
from tests.router.fakes import FakeDecodeNode

FAST = {"batch_idle_window_s": 0.05, "batch_lease_s": 3.0}


@pytest.fixture
def node() -> ChatNode:
    return ChatNode()


@pytest.fixture
async def decode(cluster: Cluster, node: ChatNode) -> FakeDecodeNode:
    return await cluster.decode(handler=node)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "batches.db"


@pytest.fixture
async def router(cluster: Cluster, decode: FakeDecodeNode, store: Path) -> RunningRouter:
    return await cluster.router(decode, batch_store=f"sqlite:///{store}", **FAST)


@pytest.fixture
async def client(router: RunningRouter) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(router) as found:
        yield found


def client_of(router: RunningRouter, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key=key, max_retries=0)

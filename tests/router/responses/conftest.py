from __future__ import annotations

from pathlib import Path

import pytest

from tests.router.cluster import Cluster, RunningRouter
from tests.router.fakes import FakeDecodeNode
from tests.router.responses.api import Api
from tests.router.responses.node import ResponseNode


@pytest.fixture
def node() -> ResponseNode:
    return ResponseNode()


@pytest.fixture
async def decode(cluster: Cluster, node: ResponseNode) -> FakeDecodeNode:
    return await cluster.decode(handler=node)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "responses.db"


@pytest.fixture
async def router(cluster: Cluster, decode: FakeDecodeNode, store: Path) -> RunningRouter:
    return await cluster.router(decode, response_store=f"sqlite:///{store}")


@pytest.fixture
def api(router: RunningRouter) -> Api:
    return Api(router)

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.router.cluster import Cluster, run_cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Starts nodes and routers; at the end everything is stopped and must be empty."""
    async with run_cluster() as cluster:
        yield cluster

"""Gives tests a `cluster`: a stand-in without processes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.kubernetes_stand_in.cluster import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster.hollow() as cluster:
        yield cluster

"""Gives tests a `release`: the chart on a stand-in cluster without processes, through each Helm."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.helm.releases.helm_release import RELEASES, Release
from tests.kubernetes_stand_in.cluster import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster.hollow() as cluster:
        yield cluster


@pytest.fixture(params=RELEASES)
async def release(request: pytest.FixtureRequest, cluster: Cluster, tmp_path: Path) -> Release:
    """Returns a release that is not installed yet."""
    return RELEASES[request.param](cluster, tmp_path)

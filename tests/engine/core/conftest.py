"""The oracle that all tests of the whole engine compare with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.core.tiny_engine import Oracle


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    oracle = Oracle()
    yield oracle
    oracle.close()

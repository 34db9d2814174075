"""AsyncLLM over a core that the test plays."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.frontend import async_llm
from engine.frontend.async_llm import AsyncLLM
from tests.engine.core.tiny_engine import tiny_config
from tests.engine.frontend.fake_core import FakeCore


@pytest.fixture
async def llm(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncLLM]:
    def make(config: EngineConfig, *callbacks: Any) -> FakeCore:
        return FakeCore(config, *callbacks)

    monkeypatch.setattr(async_llm, "EngineCoreClient", make)
    llm = await AsyncLLM.start(tiny_config())
    yield llm
    await llm.shutdown()
    assert not llm._states
    assert not llm._outside
    assert not llm._prompts
    assert not llm._kv_results


@pytest.fixture
def core(llm: AsyncLLM) -> FakeCore:
    core = llm._client
    assert isinstance(core, FakeCore)
    return core

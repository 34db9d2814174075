"""Prefixes move between caches on a GPU, either way, and every token is as if it was computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.frontend.async_llm import AsyncLLM
from kv_transfer.config import KVRole
from tests.engine.core.pd_pair import start_engines
from tests.engine.core.test_gpu_pd_engines import config, ended
from tests.engine.core.test_shared_prefixes import Nodes, prompt_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
]


def sharing(kv_role: KVRole, transport: str) -> EngineConfig:
    base = config(kv_role, transport, deterministic=True)
    assert base.kv_transfer is not None
    return replace(
        base,
        cache=replace(base.cache, enable_prefix_caching=True),
        kv_transfer=replace(base.kv_transfer, shares_prefixes=True, pulls_always=True),
    )


@pytest.mark.parametrize("transport", ["cuda_ipc,stream", "stream"])
async def test_prefixes_come_from_prefill_and_decode(transport: str) -> None:
    roles: dict[str, KVRole] = {
        "first": "kv_producer",
        "second": "kv_producer",
        "decode": "kv_consumer",
    }
    starting = (AsyncLLM.start(sharing(role, transport)) for role in roles.values())
    nodes = Nodes(dict(zip(roles, await start_engines(*starting), strict=True)))
    await nodes.serve()
    for seed, length in enumerate((64, 65, 130, 200)):
        await nodes.forget_all()
        prompt = prompt_of(seed, length)
        answer = await nodes.turn(prompt, "first", num_new=24)
        turn = [*prompt, *answer, 5, 6, 7]
        expected = await nodes.turn(turn, "first", num_new=8)
        pulled = nodes.count("second", "prefix_pulled_tokens")
        assert await nodes.turn(prompt, "second", "first", num_new=24) == answer
        await nodes.settle()
        assert nodes.count("second", "prefix_pulled_tokens") - pulled == (length - 1) // 8 * 8
        pulled = nodes.count("second", "prefix_pulled_tokens")
        assert await nodes.turn(turn, "second", "decode", num_new=8) == expected
        await nodes.settle()
        assert nodes.count("second", "prefix_pulled_tokens") > pulled
    await nodes.close()
    for llm in nodes.engines.values():
        await ended(llm)

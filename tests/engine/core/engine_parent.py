"""A node server that does nothing but hold an engine, for tests that kill it."""

from __future__ import annotations

import asyncio
import json

from engine.frontend.async_llm import AsyncLLM
from host.termination import die_with_parent
from tests.engine.core.tiny_engine import tiny_config


async def main() -> None:
    llm = await AsyncLLM.start(tiny_config())
    print(json.dumps([llm.core_pid, *llm.ready.worker_pids]), flush=True)
    print(await llm.wait_dead(), flush=True)


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main())

"""A batch that runs while a load is measured: what clients notice of it, and how much of it was
computed.

1. `running_batch` uploads requests and begins a batch of them, waits until some are answered, and
   yields
2. the load is measured
3. it ends: counts what was answered in between, and cancels the batch
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from openai import AsyncOpenAI

_PATH: Final = "/v1/completions"
_NUM_LINES = 4000
_BEGINS_S = 40.0
_POLL_S = 0.1


@dataclass(slots=True)
class BatchBeside:
    """Requests of `n_in` and `n_out` tokens each. `num_answered` in `seconds`: known at the end."""

    n_in: int
    n_out: int
    num_answered: int = 0
    seconds: float = 0.0


@asynccontextmanager
async def running_batch(
    url: str, model: str, vocabulary: tuple[int, int], batch: BatchBeside
) -> AsyncIterator[None]:
    """Raises SystemExit where none of its requests is answered, `openai.APIError` where the server
    runs no batches."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        name = await _begin(client, model, vocabulary, batch)
        try:
            begun, before = time.monotonic(), await _first_answered(client, name)
            yield
            batch.num_answered = await _answered(client, name) - before
            batch.seconds = time.monotonic() - begun
        finally:
            await client.batches.cancel(name)


async def _begin(
    client: AsyncOpenAI, model: str, vocabulary: tuple[int, int], batch: BatchBeside
) -> str:
    chance = random.Random(0)
    lines = []
    for number in range(_NUM_LINES):
        prompt = [chance.randrange(*vocabulary) for _ in range(batch.n_in)]
        body = {"model": model, "prompt": prompt, "max_tokens": batch.n_out, "ignore_eos": True}
        line = {"custom_id": str(number), "method": "POST", "url": _PATH, "body": body}
        lines.append(json.dumps(line))
    file = await client.files.create(
        file=("batch.jsonl", "\n".join(lines).encode()), purpose="batch"
    )
    created = await client.batches.create(
        input_file_id=file.id, endpoint=_PATH, completion_window="24h"
    )
    return created.id


async def _first_answered(client: AsyncOpenAI, name: str) -> int:
    for _ in range(round(_BEGINS_S / _POLL_S)):
        if count := await _answered(client, name):
            return count
        await asyncio.sleep(_POLL_S)
    raise SystemExit(f"error: no request of the batch was answered in {_BEGINS_S} s")


async def _answered(client: AsyncOpenAI, name: str) -> int:
    found = await client.batches.retrieve(name)
    if found.status in ("failed", "cancelled", "expired"):
        raise SystemExit(f"error: the batch ended: {found.to_json()}")
    return found.request_counts.completed if found.request_counts else 0

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
from typing import Any

import aiohttp

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
    """Raises SystemExit where the server runs no batches, or none of its requests is answered."""
    async with aiohttp.ClientSession(url) as client:
        name = await _begin(client, model, vocabulary, batch)
        try:
            begun, before = time.monotonic(), await _first_answered(client, name)
            yield
            batch.num_answered = await _answered(client, name) - before
            batch.seconds = time.monotonic() - begun
        finally:
            await _call(client, f"/v1/batches/{name}/cancel", method="POST")


async def _begin(
    client: aiohttp.ClientSession, model: str, vocabulary: tuple[int, int], batch: BatchBeside
) -> str:
    chance = random.Random(0)
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": model,
                "prompt": [chance.randrange(*vocabulary) for _ in range(batch.n_in)],
                "max_tokens": batch.n_out,
                "ignore_eos": True,
            },
        }
        for number in range(_NUM_LINES)
    ]
    form = aiohttp.FormData({"purpose": "batch"})
    text = "\n".join(json.dumps(line) for line in lines)
    form.add_field("file", text.encode(), filename="batch.jsonl")
    file = await _call(client, "/v1/files", method="POST", data=form)
    body = {
        "input_file_id": file["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    return str((await _call(client, "/v1/batches", method="POST", json=body))["id"])


async def _first_answered(client: aiohttp.ClientSession, name: str) -> int:
    for _ in range(round(_BEGINS_S / _POLL_S)):
        if count := await _answered(client, name):
            return count
        await asyncio.sleep(_POLL_S)
    raise SystemExit(f"error: no request of the batch was answered in {_BEGINS_S} s")


async def _answered(client: aiohttp.ClientSession, name: str) -> int:
    found = await _call(client, f"/v1/batches/{name}")
    if found["status"] in ("failed", "cancelled", "expired"):
        raise SystemExit(f"error: the batch ended: {json.dumps(found)}")
    return int(found["request_counts"]["completed"])


async def _call(
    client: aiohttp.ClientSession, path: str, method: str = "GET", **arguments: Any
) -> dict[str, Any]:
    async with client.request(method, path, **arguments) as answer:
        if answer.status != 200:
            raise SystemExit(f"error: {path}: {answer.status} {await answer.text()}")
        found: dict[str, Any] = await answer.json()
        return found

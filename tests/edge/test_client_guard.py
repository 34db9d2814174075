"""Clients that hang up end what is done for them."""

from __future__ import annotations

import asyncio
from collections import Counter

from starlette.types import Message

from edge.http.connection.client_connection import ClientDisconnected, ClientGuard


async def test_of_clients_that_leave_together_few_are_left_in_a_turn() -> None:
    """All that 5,000 leave behind took the loop for 0.3 s, in which no other stream went on."""
    left, ended, turn = asyncio.Event(), Counter[int](), 0

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async def answer() -> None:
        try:
            async with ClientGuard(receive):
                await asyncio.Event().wait()
        except ClientDisconnected:
            ended[turn] += 1

    answers = [asyncio.create_task(answer()) for _ in range(100)]
    for _ in range(3):
        await asyncio.sleep(0)
    left.set()
    while ended.total() < len(answers):
        await asyncio.sleep(0)
        turn += 1
    assert max(ended.values()) <= 4
    assert len(ended) > 50
    await asyncio.gather(*answers)

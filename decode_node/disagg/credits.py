"""Knows how much room the decode engine has, counted before it is asked.

A prompt is sent to a prefill node only when its KV has room here: a full decode tier then holds
no KV on the prefill tier. Each request holds one `Claim` on KV blocks from admission to its end:

    1. `acquire`: waits in order of arrival until the blocks and a seat are free
    2. `grow_to`: the request became longer than its first claim; never waits
    3. `release`: it ended; whoever waits first and fits is admitted

Claims are an upper bound: blocks that requests share through the prefix cache count for each.
`claim_now` counts requests that need not wait here because the engine has its own queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

_RESERVED_OUTPUT_TOKENS = 64
"""Output tokens that are part of the first claim, so that running requests rarely outgrow it and
evict each other."""


class Claim:
    """The blocks and the seat that one request holds. `release` is idempotent."""

    __slots__ = ("_credits", "_num_tokens", "_released", "num_blocks")

    def __init__(self, credits: KVCredits, num_blocks: int) -> None:
        self._credits = credits
        self.num_blocks = num_blocks
        self._num_tokens = num_blocks * credits.block_size
        self._released = False

    def grow_to(self, num_tokens: int) -> None:
        if num_tokens > self._num_tokens and not self._released:
            more = self._credits.num_blocks_for(num_tokens) - self.num_blocks
            self.num_blocks += more
            self._num_tokens = self.num_blocks * self._credits.block_size
            self._credits.take(more)

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._credits.give_back(self.num_blocks)


@dataclass(slots=True)
class _Waiter:
    num_blocks: int
    admitted: asyncio.Future[None]


class KVCredits:
    """Hands out claims on `num_blocks` blocks by at most `max_claims` requests at once."""

    def __init__(self, num_blocks: int, block_size: int, max_claims: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._max_claims = max_claims
        self._num_claims = 0
        self._num_claimed = 0
        self._waiters: deque[_Waiter] = deque()

    @property
    def num_free(self) -> int:
        """Blocks that nobody claims; negative when requests outgrew their claims."""
        return self.num_blocks - self._num_claimed

    @property
    def num_claims(self) -> int:
        return self._num_claims

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    async def acquire(self, num_prompt_tokens: int, max_tokens: int) -> Claim:
        """Waits for room. Whatever its size, a request is admitted when it is alone."""
        num_blocks = self._first_claim(num_prompt_tokens, max_tokens)
        if self._waiters or not self._fits(num_blocks):
            await self._wait(num_blocks)
        else:
            self._admit(num_blocks)
        return Claim(self, num_blocks)

    def claim_now(self, num_prompt_tokens: int, max_tokens: int) -> Claim:
        """Claims without waiting, whatever is free."""
        num_blocks = self._first_claim(num_prompt_tokens, max_tokens)
        self._admit(num_blocks)
        return Claim(self, num_blocks)

    def refuse_waiters(self, error: Exception) -> None:
        """Makes every `acquire` that waits raise `error`."""
        for waiter in self._waiters:
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)
        self._waiters.clear()

    def take(self, num_blocks: int) -> None:
        self._num_claimed += num_blocks

    def give_back(self, num_blocks: int) -> None:
        """Takes the blocks and the seat of a claim back."""
        self._num_claimed -= num_blocks
        self._num_claims -= 1
        self._admit_waiters()

    async def _wait(self, num_blocks: int) -> None:
        waiter = _Waiter(num_blocks, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if waiter.admitted.cancelled():
                self._admit_waiters()
            else:  # admitted in the same moment
                self.give_back(num_blocks)
            raise

    def _admit_waiters(self) -> None:
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.admitted.cancelled():
                if not self._fits(waiter.num_blocks):
                    return
                self._admit(waiter.num_blocks)
                waiter.admitted.set_result(None)
            self._waiters.popleft()

    def _admit(self, num_blocks: int) -> None:
        self._num_claims += 1
        self._num_claimed += num_blocks

    def _fits(self, num_blocks: int) -> bool:
        if self._num_claims == 0:
            return True
        return self._num_claims < self._max_claims and num_blocks <= self.num_free

    def _first_claim(self, num_prompt_tokens: int, max_tokens: int) -> int:
        return self.num_blocks_for(num_prompt_tokens + min(max_tokens, _RESERVED_OUTPUT_TOKENS))

"""Knows how much room the decode engine has, counted before it is asked.

A prompt is sent to a prefill node only when its KV has room here: a full decode tier then holds
no KV on the prefill tier. Each request holds one `Claim` on KV blocks from admission to its end:

    1. `acquire`: waits in order of arrival until the blocks and a seat are free
    2. `grow_to`: the request became longer than its first claim; never waits
    3. `release`: it ended; whoever waits first and fits is admitted

Choices of one prompt share a claim: full blocks of the prompt count once, each choice has a seat
and the blocks behind them, and gives both back when it ends (`end_choice`).

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


@dataclass(frozen=True, slots=True)
class ClaimSize:
    """Says what a request needs: `num_shared` blocks of its prompt, and for each of its choices
    `num_own` more, and `num_states` that hold no tokens."""

    num_shared: int
    num_own: int
    num_choices: int
    num_states: int = 0

    @property
    def num_blocks(self) -> int:
        return self.num_shared + self.num_choices * (self.num_own + self.num_states)


class Claim:
    """The blocks and the seats that one request holds, with all its choices. `release` and
    `end_choice` are idempotent."""

    __slots__ = ("_credits", "_num_shared", "_num_tokens")

    def __init__(self, credits: KVCredits, size: ClaimSize) -> None:
        self._credits = credits
        self._num_shared = size.num_shared
        num_tokens = (size.num_shared + size.num_own) * credits.block_size
        self._num_tokens = dict.fromkeys(range(size.num_choices), num_tokens)
        """Tokens that each choice which goes on has room for."""

    @property
    def num_choices(self) -> int:
        """Returns how many answers hold a seat by this claim."""
        return len(self._num_tokens)

    def grow_to(self, num_tokens: int, choice: int = 0) -> None:
        covered = self._num_tokens.get(choice)
        if covered is not None and num_tokens > covered:
            more = self._credits.num_blocks_for(num_tokens - covered)
            self._num_tokens[choice] = covered + more * self._credits.block_size
            self._credits.take(more)

    def end_choice(self, choice: int) -> None:
        """Gives back what one choice holds. The last one takes the prompt's blocks along."""
        covered = self._num_tokens.pop(choice, None)
        if covered is not None:
            own = self._credits.num_blocks_for(covered) - self._num_shared
            own += self._credits.num_states
            self._credits.give_back(own + (0 if self._num_tokens else self._num_shared))

    def release(self) -> None:
        for choice in list(self._num_tokens):
            self.end_choice(choice)


@dataclass(slots=True)
class _Waiter:
    size: ClaimSize
    admitted: asyncio.Future[None]


class KVCredits:
    """Hands out claims on `num_blocks` blocks by at most `max_claims` answers at once.

    Args:
        num_states: Blocks that each answer takes besides, whatever its length.
    """

    def __init__(
        self, num_blocks: int, block_size: int, max_claims: int, num_states: int = 0
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_states = num_states
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
        """Returns the number of answers that hold a seat."""
        return self._num_claims

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    async def acquire(self, num_prompt_tokens: int, max_tokens: int, num_choices: int = 1) -> Claim:
        """Waits for room. Whatever its size, a request is admitted when it is alone."""
        size = self._first_claim(num_prompt_tokens, max_tokens, num_choices)
        if self._waiters or not self._fits(size):
            await self._wait(size)
        else:
            self._admit(size)
        return Claim(self, size)

    def claim_now(self, num_prompt_tokens: int, max_tokens: int, num_choices: int = 1) -> Claim:
        """Claims without waiting, whatever is free."""
        size = self._first_claim(num_prompt_tokens, max_tokens, num_choices)
        self._admit(size)
        return Claim(self, size)

    def refuse_waiters(self, error: Exception) -> None:
        """Makes every `acquire` that waits raise `error`."""
        for waiter in self._waiters:
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)
        self._waiters.clear()

    def take(self, num_blocks: int) -> None:
        self._num_claimed += num_blocks

    def give_back(self, num_blocks: int) -> None:
        """Takes the blocks and the seat of an answer back."""
        self._num_claimed -= num_blocks
        self._num_claims -= 1
        self._admit_waiters()

    async def _wait(self, size: ClaimSize) -> None:
        waiter = _Waiter(size, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if waiter.admitted.cancelled():
                self._admit_waiters()
            else:  # admitted in the same moment
                Claim(self, size).release()
            raise

    def _admit_waiters(self) -> None:
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.admitted.cancelled():
                if not self._fits(waiter.size):
                    return
                self._admit(waiter.size)
                waiter.admitted.set_result(None)
            self._waiters.popleft()

    def _admit(self, size: ClaimSize) -> None:
        self._num_claims += size.num_choices
        self._num_claimed += size.num_blocks

    def _fits(self, size: ClaimSize) -> bool:
        if self._num_claims == 0:
            return True
        has_seats = self._num_claims + size.num_choices <= self._max_claims
        return has_seats and size.num_blocks <= self.num_free

    def _first_claim(self, num_prompt_tokens: int, max_tokens: int, num_choices: int) -> ClaimSize:
        num_blocks = self.num_blocks_for(
            num_prompt_tokens + min(max_tokens, _RESERVED_OUTPUT_TOKENS)
        )
        num_shared = num_prompt_tokens // self.block_size
        return ClaimSize(num_shared, num_blocks - num_shared, num_choices, self.num_states)

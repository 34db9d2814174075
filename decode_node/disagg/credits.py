"""Knows how much room the decode engine has, counted before it is asked.

A prompt is sent to a prefill node only when its KV has room here: a full decode tier then holds
no KV on the prefill tier. Each request holds one `Claim` on KV blocks from admission to its end:

    1. `acquire`: waits in order of arrival until the blocks and a seat are free
    2. `grow_to`: the request became longer than its first claim; never waits
    3. `release`: it ended; the first that waits and fits is admitted

Choices of one prompt share a claim: full blocks of the prompt count once, each choice has a seat
and the blocks behind them, and gives both back when it ends (`end_choice`).

Claims are an upper bound: blocks that requests share through the prefix cache count for each.
`claim_now` counts requests that need not wait here because the engine has its own queue.

An engine with data-parallel groups has a pool of blocks and seats for each; a claim is on one of
them: of those with room, the one with fewest claimed blocks, less those that it has of the prompt.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class GroupPreference:
    """Says what is better in which data-parallel group.

    Attributes:
        cached_tokens: Tokens of the prompt that each has; empty: none has any.
        only: The groups that will do; empty: all.
    """

    cached_tokens: Sequence[int] = ()
    only: Sequence[int] = ()


ANYWHERE = GroupPreference()


class Claim:
    """The blocks and the seats that one request holds, with all its choices. `release` and
    `end_choice` are idempotent."""

    __slots__ = ("_credits", "_num_shared", "_num_tokens", "group")

    def __init__(self, credits: KVCredits, size: ClaimSize, group: int) -> None:
        self._credits = credits
        self.group = group
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
            self._credits.take(more, self.group)

    def end_choice(self, choice: int) -> None:
        """Gives back what one choice holds. The last one takes the prompt's blocks along."""
        covered = self._num_tokens.pop(choice, None)
        if covered is not None:
            own = self._credits.num_blocks_for(covered) - self._num_shared
            own += self._credits.num_states
            shared = 0 if self._num_tokens else self._num_shared
            self._credits.give_back(own + shared, self.group)

    def release(self) -> None:
        for choice in list(self._num_tokens):
            self.end_choice(choice)


@dataclass(slots=True)
class _Waiter:
    """Waits for room; `admitted` is the group that has it."""

    size: ClaimSize
    preference: GroupPreference
    admitted: asyncio.Future[int]


@dataclass(slots=True)
class _Claimed:
    """Counts what is claimed of one group."""

    num_claims: int = 0
    num_blocks: int = 0


class KVCredits:
    """Hands out claims on `num_blocks` blocks by at most `max_claims` answers at once, in each of
    `num_groups` groups.

    Args:
        num_states: Blocks that each answer takes besides, whatever its length.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_claims: int,
        num_states: int = 0,
        num_groups: int = 1,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_states = num_states
        self._max_claims = max_claims
        self._groups = [_Claimed() for _ in range(num_groups)]
        self._waiters: deque[_Waiter] = deque()

    @property
    def num_free(self) -> int:
        """Blocks that nothing claims; negative when requests outgrew their claims."""
        return sum(self.num_blocks - group.num_blocks for group in self._groups)

    @property
    def num_claims(self) -> int:
        """Returns the number of answers that hold a seat."""
        return sum(group.num_claims for group in self._groups)

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    async def acquire(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        num_choices: int = 1,
        preference: GroupPreference = ANYWHERE,
    ) -> Claim:
        """Waits for room. Whatever its size, a request is admitted when it is alone."""
        size = self._first_claim(num_prompt_tokens, max_tokens, num_choices)
        group = None if self._waiters else self._fitting(size, preference)
        if group is None:
            group = await self._wait(size, preference)
        else:
            self._admit(size, group)
        return Claim(self, size, group)

    def claim_now(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        num_choices: int = 1,
        preference: GroupPreference = ANYWHERE,
    ) -> Claim:
        """Claims without waiting, whatever is free."""
        size = self._first_claim(num_prompt_tokens, max_tokens, num_choices)
        group = self._ranked(preference)[0]
        self._admit(size, group)
        return Claim(self, size, group)

    def refuse_waiters(self, error: Exception) -> None:
        """Makes every `acquire` that waits raise `error`."""
        for waiter in self._waiters:
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)
        self._waiters.clear()

    def take(self, num_blocks: int, group: int = 0) -> None:
        self._groups[group].num_blocks += num_blocks

    def give_back(self, num_blocks: int, group: int = 0) -> None:
        """Takes the blocks and the seat of an answer back."""
        self._groups[group].num_blocks -= num_blocks
        self._groups[group].num_claims -= 1
        self._admit_waiters()

    async def _wait(self, size: ClaimSize, preference: GroupPreference) -> int:
        waiter = _Waiter(size, preference, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            return await waiter.admitted
        except asyncio.CancelledError:
            if waiter.admitted.cancelled():
                self._admit_waiters()
            else:  # admitted in the same moment
                Claim(self, size, waiter.admitted.result()).release()
            raise

    def _admit_waiters(self) -> None:
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.admitted.cancelled():
                group = self._fitting(waiter.size, waiter.preference)
                if group is None:
                    return
                self._admit(waiter.size, group)
                waiter.admitted.set_result(group)
            self._waiters.popleft()

    def _admit(self, size: ClaimSize, group: int) -> None:
        self._groups[group].num_claims += size.num_choices
        self._groups[group].num_blocks += size.num_blocks

    def _ranked(self, preference: GroupPreference) -> list[int]:
        """Returns the groups that will do, the best first."""

        def rank(group: int) -> tuple[int, int]:
            cached = (
                preference.cached_tokens[group] // self.block_size
                if preference.cached_tokens
                else 0
            )
            return self._groups[group].num_blocks - cached, self._groups[group].num_claims

        return sorted(preference.only or range(len(self._groups)), key=rank)

    def _fitting(self, size: ClaimSize, preference: GroupPreference) -> int | None:
        """Returns the best group that has room; None: none has."""
        return next((group for group in self._ranked(preference) if self._fits(size, group)), None)

    def _fits(self, size: ClaimSize, group: int) -> bool:
        claimed = self._groups[group]
        has_seats = claimed.num_claims + size.num_choices <= self._max_claims
        has_blocks = size.num_blocks <= self.num_blocks - claimed.num_blocks
        return claimed.num_claims == 0 or (has_seats and has_blocks)

    def _first_claim(self, num_prompt_tokens: int, max_tokens: int, num_choices: int) -> ClaimSize:
        num_blocks = self.num_blocks_for(
            num_prompt_tokens + min(max_tokens, _RESERVED_OUTPUT_TOKENS)
        )
        num_shared = num_prompt_tokens // self.block_size
        return ClaimSize(num_shared, num_blocks - num_shared, num_choices, self.num_states)

"""Knows how much room the decode engine has, counted before it is asked.

A prompt is sent to a prefill node only when its KV has room here: a full decode tier then holds
no KV on the prefill tier. Each request holds one `Claim` on KV blocks from admission to its end:

    1. `acquire`: waits in order of arrival until the blocks and a seat are free
    2. `grow_to`: the request became longer than its first claim; never waits
    3. `release`: it ended; the first that waits and fits is admitted

Requests of the idle class wait behind all others. From the first `grow_to` on, which is when the
engine has them in rows, what they hold counts as free for others, for whom the engine preempts
them (`engine/sched/idle_blocks.py`). Before, a prefill node may work for them, or write KV.

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

    __slots__ = ("_credits", "_is_idle", "_num_shared", "_num_tokens", "_yields", "group")

    def __init__(
        self, credits: KVCredits, size: ClaimSize, group: int, *, is_idle: bool = False
    ) -> None:
        self._credits = credits
        self._is_idle = is_idle
        self._yields = False
        """Others may have what it holds."""
        self.group = group
        self._num_shared = size.num_shared
        num_tokens = (size.num_shared + size.num_own) * credits.block_size
        self._num_tokens = dict.fromkeys(range(size.num_choices), num_tokens)
        """Tokens that each choice which goes on has room for."""

    @property
    def num_choices(self) -> int:
        """Returns how many answers hold a seat by this claim."""
        return len(self._num_tokens)

    @property
    def num_yielding(self) -> int:
        """Returns how many blocks others may have of it."""
        return self._num_blocks if self._yields else 0

    def grow_to(self, num_tokens: int, choice: int = 0) -> None:
        covered = self._num_tokens.get(choice)
        if covered is None:
            return
        if self._is_idle and not self._yields:
            self._yields = True
            self._credits.begin_to_yield(self._num_blocks, self.num_choices, self.group)
        if num_tokens > covered:
            more = self._credits.num_blocks_for(num_tokens - covered)
            self._num_tokens[choice] = covered + more * self._credits.block_size
            self._credits.take(more, self.group, yields=self._yields)

    def end_choice(self, choice: int) -> None:
        """Gives back what one choice holds. The last one takes the prompt's blocks along."""
        covered = self._num_tokens.pop(choice, None)
        if covered is not None:
            shared = 0 if self._num_tokens else self._num_shared
            num_blocks = self._own_blocks(covered) + shared
            self._credits.give_back(num_blocks, self.group, yields=self._yields)

    def release(self) -> None:
        for choice in list(self._num_tokens):
            self.end_choice(choice)

    @property
    def _num_blocks(self) -> int:
        return self._num_shared + sum(map(self._own_blocks, self._num_tokens.values()))

    def _own_blocks(self, num_tokens: int) -> int:
        """Returns the blocks of a choice with room for this many tokens, but those it shares."""
        credits = self._credits
        return credits.num_blocks_for(num_tokens) - self._num_shared + credits.num_states


@dataclass(slots=True, eq=False)
class _Waiter:
    """Waits for room; `admitted` is the group that has it."""

    size: ClaimSize
    preference: GroupPreference
    admitted: asyncio.Future[int]
    is_idle: bool


@dataclass(slots=True)
class _Claimed:
    """Counts what is claimed of one group, and what of that others may have."""

    num_claims: int = 0
    num_blocks: int = 0
    num_yielding_claims: int = 0
    num_yielding_blocks: int = 0


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
        self._idle_waiters: deque[_Waiter] = deque()

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
        return len(self._waiters) + len(self._idle_waiters)

    def has_waiting(self, *, is_idle: bool) -> bool:
        """Returns whether any wait that go before a request that comes now."""
        return bool(self._waiters or (is_idle and self._idle_waiters))

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    async def acquire(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        num_choices: int = 1,
        preference: GroupPreference = ANYWHERE,
        *,
        is_idle: bool = False,
    ) -> Claim:
        """Waits for room. Whatever its size, a request is admitted when it is alone."""
        size = self._first_claim(num_prompt_tokens, max_tokens, num_choices)
        must_wait = self.has_waiting(is_idle=is_idle)
        group = None if must_wait else self._fitting(size, preference, is_idle=is_idle)
        if group is None:
            group = await self._wait(size, preference, is_idle=is_idle)
        else:
            self._admit(size, group)
        return Claim(self, size, group, is_idle=is_idle)

    def claim_now(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        num_choices: int = 1,
        preference: GroupPreference = ANYWHERE,
        *,
        is_idle: bool = False,
    ) -> Claim:
        """Claims without waiting, whatever is free."""
        size = self._first_claim(num_prompt_tokens, max_tokens, num_choices)
        group = self._ranked(preference)[0]
        self._admit(size, group)
        return Claim(self, size, group, is_idle=is_idle)

    def refuse_waiters(self, error: Exception) -> None:
        """Makes every `acquire` that waits raise `error`."""
        for line in (self._waiters, self._idle_waiters):
            for waiter in line:
                if not waiter.admitted.done():
                    waiter.admitted.set_exception(error)
            line.clear()

    def begin_to_yield(self, num_blocks: int, num_claims: int, group: int) -> None:
        """Counts what is claimed already as what others may have."""
        self._groups[group].num_yielding_blocks += num_blocks
        self._groups[group].num_yielding_claims += num_claims
        self._admit_waiters()

    def take(self, num_blocks: int, group: int = 0, *, yields: bool = False) -> None:
        claimed = self._groups[group]
        claimed.num_blocks += num_blocks
        claimed.num_yielding_blocks += num_blocks * yields

    def give_back(self, num_blocks: int, group: int = 0, *, yields: bool = False) -> None:
        """Takes the blocks and the seat of an answer back."""
        claimed = self._groups[group]
        claimed.num_blocks -= num_blocks
        claimed.num_claims -= 1
        claimed.num_yielding_blocks -= num_blocks * yields
        claimed.num_yielding_claims -= yields
        self._admit_waiters()

    async def _wait(self, size: ClaimSize, preference: GroupPreference, *, is_idle: bool) -> int:
        admitted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(size, preference, admitted, is_idle)
        line = self._idle_waiters if is_idle else self._waiters
        line.append(waiter)
        try:
            return await admitted
        except asyncio.CancelledError:
            if admitted.cancelled():
                if waiter in line:
                    line.remove(waiter)
                self._admit_waiters()
            elif admitted.exception() is None:  # admitted in the same moment
                Claim(self, size, admitted.result()).release()
            raise

    def _admit_waiters(self) -> None:
        while line := self._waiters or self._idle_waiters:
            waiter = line[0]
            if not waiter.admitted.cancelled():
                group = self._fitting(waiter.size, waiter.preference, is_idle=waiter.is_idle)
                if group is None:
                    return
                self._admit(waiter.size, group)
                waiter.admitted.set_result(group)
            line.popleft()

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

    def _fitting(
        self, size: ClaimSize, preference: GroupPreference, *, is_idle: bool
    ) -> int | None:
        """Returns the best group that has room; None: none has. One that has it without preempting
        anything is better."""
        ranked = self._ranked(preference)
        if (group := self._first_fitting(size, ranked, may_preempt=False)) is not None:
            return group
        return None if is_idle else self._first_fitting(size, ranked, may_preempt=True)

    def _first_fitting(
        self, size: ClaimSize, ranked: Sequence[int], *, may_preempt: bool
    ) -> int | None:
        for group in ranked:
            claimed = self._groups[group]
            num_claims = claimed.num_claims - claimed.num_yielding_claims * may_preempt
            num_blocks = claimed.num_blocks - claimed.num_yielding_blocks * may_preempt
            has_seats = num_claims + size.num_choices <= self._max_claims
            has_blocks = size.num_blocks <= self.num_blocks - num_blocks
            if num_claims == 0 or (has_seats and has_blocks):
                return group
        return None

    def _first_claim(self, num_prompt_tokens: int, max_tokens: int, num_choices: int) -> ClaimSize:
        num_blocks = self.num_blocks_for(
            num_prompt_tokens + min(max_tokens, _RESERVED_OUTPUT_TOKENS)
        )
        num_shared = num_prompt_tokens // self.block_size
        return ClaimSize(num_shared, num_blocks - num_shared, num_choices, self.num_states)

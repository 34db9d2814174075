"""Several answers to one prompt, whose KV exists once (n > 1).

One request computes or pulls the prompt and draws the first token of every choice. It is scheduled
as one that asks for a single token. Behind it the choices fork off, and go on as ordinary requests:

                     first tokens and KV of the whole prompt
    PROMPT ────────────────────────────────────────────────▶ SHARED ──▶ ENDED

    PROMPT   the prompt's request waits, pulls or is in a row, like any other; its choices are
             known and do nothing. Their first tokens may be known already, from a peer
    SHARED   the prompt's request is gone, and its blocks are the fork's. Choices wait for rows, in
             order. Each one that enters a row has KV of the whole prompt: full blocks are shared
             by reference count, the last partial one is copied
    ENDED    no choice is left that could fork

             table of the prompt    [ b0 ][ b1 ][ b2..]
             table of a choice      [ b0 ][ b1 ][ b7..][ b8 ]    b2 copied to b7
             table of the last one  [ b0 ][ b1 ][ b2..][ b9 ]    takes what the fork has

- A choice that ends, wherever it is, concerns nothing else. With the last one that has not forked,
  the prompt's request is aborted, or the fork's blocks are released: shared ones stay with those
  that have forked.
- Blocks wait with the fork as long as rows are short. When running requests cannot go on
  otherwise, or nothing runs and a choice lacks a block, the newest fork gives up its blocks
  (`reclaim`). Its choices then wait as ordinary requests, first token and all, and each computes
  the prompt again, as after a preemption.
- A choice that is preempted computes alone what it has. Who knows first tokens already and
  computes the prompt all the same draws none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.config import SchedulingPolicy
from engine.contracts.messages import EngineCoreOutput, EngineCoreRequest
from engine.contracts.outputs import TokenLogprobs
from engine.contracts.request import Request, RequestStatus
from engine.kv_cache.kept_states import BlockCopy
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.request_queue import RequestQueue
from engine.sched.step_fence import StepFence


@dataclass(slots=True, eq=False)
class Fork:
    """One prompt with its choices; only `Forks` changes it.

    Attributes:
        choices: Those that have not forked, by id and in order.
        is_shared: It is SHARED, otherwise PROMPT.
    """

    prompt: Request
    choices: dict[str, Request] = field(default_factory=dict)
    is_shared: bool = False


class Forks:
    """Finds forks by the ids of their prompts and choices. Choices of a fork that gives up its
    blocks go to `waiting`."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        fence: StepFence,
        waiting: RequestQueue,
        policy: SchedulingPolicy,
    ) -> None:
        self._kv_cache = kv_cache
        self._fence = fence
        self._waiting = waiting
        self.ready = RequestQueue(policy)
        """Choices of forks that are SHARED."""
        self._forks: dict[str, Fork] = {}  # [request id of the prompt]
        self._of_choice: dict[str, Fork] = {}  # [request id of a choice]

    def add(self, prompt: Request) -> list[Request]:
        """Begins a fork, if the request has choices. Returns their requests; its own asks for one
        token from now on."""
        if not prompt.choice_ids:
            return []
        fork = self._forks[prompt.request_id] = Fork(prompt)
        for index, name in enumerate(prompt.choice_ids):
            fork.choices[name] = _choice(prompt, name, index)
            self._of_choice[name] = fork
        prompt.spec = prompt.spec.for_one_token()
        prompt.sampling = prompt.spec.sampling
        return list(fork.choices.values())

    def listeners(self, request_id: str) -> list[str]:
        """Returns the ids of those whom news of a request concern: its choices, or itself."""
        fork = self._forks.get(request_id)
        return [request_id] if fork is None else list(fork.choices)

    def begin(
        self, prompt: Request, first_tokens: list[int], logprobs: Sequence[TokenLogprobs]
    ) -> list[tuple[Request, EngineCoreOutput]]:
        """Gives each choice that has not ended its first token, before any has forked. Returns
        (choice, output that says so): without the token if a peer gave it, as the client has it."""
        prompt.first_tokens = first_tokens
        begun: list[tuple[Request, EngineCoreOutput]] = []
        choices = self._forks[prompt.request_id].choices
        for index, name in enumerate(prompt.choice_ids):
            if name in choices:
                output = EngineCoreOutput(name, first_tokens[index : index + 1])
                if not prompt.is_finished:
                    output.new_token_ids = []
                output.logprobs = [logprobs[index]] if logprobs else None
                choices[name].append_output_token(first_tokens[index])
                choices[name].draft_feature = prompt.draft_feature
                begun.append((choices[name], output))
        return begun

    def share(self, prompt: Request) -> None:
        """Shares the prompt's blocks, which hold KV of all its tokens: its request has left its
        row, or never needs one. First tokens are known."""
        fork = self._forks[prompt.request_id]
        fork.is_shared = True
        self._kv_cache.confirm(prompt, prompt.num_prompt_tokens)
        for choice in fork.choices.values():
            choice.num_cached_tokens = prompt.num_cached_tokens
            choice.first_scheduled_at = prompt.first_scheduled_at
            self._go_on_behind(prompt, choice)
            self.ready.add(choice)
        if not fork.choices:
            self._end(fork)

    def take_ready(self, headroom: int) -> tuple[Request, list[BlockCopy]] | None:
        """Takes the first choice of `ready` out of its fork, with blocks for all tokens that it has
        and copies to make before it computes. None, and nothing changed: `headroom` blocks would
        not stay free."""
        choice = self.ready.peek()
        fork = self._of_choice[choice.request_id]
        is_last = len(fork.choices) == 1
        copies = self._kv_cache.fork(fork.prompt, choice, headroom, takes_all=is_last)
        if copies is not None:
            self._leave(fork, choice)
        return None if copies is None else (choice, copies)

    def choice_ended(self, choice: Request) -> Request | None:
        """Forgets a choice that ended, if it has not forked. Returns the prompt's request when it
        is there for none now."""
        fork = self._of_choice.get(choice.request_id)
        if fork is None:
            return None
        self._leave(fork, choice)
        if fork.choices or fork.is_shared:
            return None
        del self._forks[fork.prompt.request_id]
        return fork.prompt

    @property
    def waits_for_steps(self) -> bool:
        """Returns whether blocks become free when a step retires."""
        return self._fence.num_blocks > 0

    def reclaim(self) -> bool:
        """Gives up the blocks of the newest fork that has some. Returns False when there is
        none."""
        shared = [fork for fork in self._forks.values() if fork.is_shared]
        if not shared:
            return False
        fork = max(shared, key=lambda fork: fork.prompt.arrival_order)
        if not fork.choices:
            self._end(fork)
        for choice in list(fork.choices.values()):
            self._leave(fork, choice)
            choice.num_computed_tokens = 0
            self._waiting.add(choice)
        return True

    # Beams ------------------------------------------------------------------------------------

    def is_held(self, beam: Request) -> bool:
        """Returns whether the blocks of a beam are here for those who continue it."""
        return beam.request_id in self._forks

    def take_together(self, beams: Sequence[Request], headroom: int) -> list[BlockCopy] | None:
        """Does for all of `beams` what `take_ready` does for one. None also if blocks of some were
        needed since they branched off: these compute them anew."""
        if any(beam.request_id not in self._of_choice for beam in beams):
            return None
        pairs = [(self._of_choice[beam.request_id].prompt, beam) for beam in beams]
        if not self._kv_cache.can_fork(pairs, headroom):
            return None
        copies: list[BlockCopy] = []
        for prompt, beam in pairs:
            fork = self._of_choice[beam.request_id]
            made = self._kv_cache.fork(prompt, beam, takes_all=len(fork.choices) == 1)
            assert made is not None
            copies += made
            self._leave(fork, beam)
        return copies

    def hold(self, beam: Request) -> None:
        """Keeps the blocks of a beam that has left its row, until it is known who continues it."""
        self._forks[beam.request_id] = Fork(beam, is_shared=True)

    def branch(self, beam: Request, successors: Sequence[Request]) -> None:
        """Lets others fork off from a beam that is held; without any, its blocks are free. Blocks
        that were needed meanwhile are computed anew by each."""
        fork = self._forks.get(beam.request_id)
        for successor in successors:
            if fork is None:
                self._waiting.add(successor)
                continue
            fork.choices[successor.request_id] = successor
            self._of_choice[successor.request_id] = fork
            self._go_on_behind(beam, successor)
            self.ready.add(successor)
        if fork is not None and not fork.choices:
            self._end(fork)

    def drop(self, beam: Request) -> None:
        """Gives up the blocks of a beam, if it is held and nothing continues it."""
        fork = self._forks.get(beam.request_id)
        if fork is not None and not fork.choices:
            self._end(fork)

    # Steps of several of these ----------------------------------------------------------------

    def _go_on_behind(self, prompt: Request, choice: Request) -> None:
        choice.num_computed_tokens = prompt.num_prompt_tokens
        choice.pulled = prompt.pulled
        choice.block_hashes = {size: list(hashes) for size, hashes in prompt.block_hashes.items()}

    def leftovers(self) -> list[str]:
        names = [f"fork of {name} ({len(f.choices)} choices)" for name, f in self._forks.items()]
        return names + [f"choice {name} of a fork" for name in self._of_choice]

    def _leave(self, fork: Fork, choice: Request) -> None:
        """Takes a choice out. The last one ends a fork that is SHARED."""
        self.ready.remove(choice)
        del fork.choices[choice.request_id], self._of_choice[choice.request_id]
        if fork.is_shared and not fork.choices:
            self._end(fork)

    def _end(self, fork: Fork) -> None:
        """Ends a fork; its last choice may have taken the blocks."""
        name = fork.prompt.request_id
        del self._forks[name]
        self._fence.release(self._kv_cache.take_blocks(name))


def _choice(prompt: Request, request_id: str, index: int) -> Request:
    choice = Request(
        EngineCoreRequest(
            request_id=request_id,
            spec=prompt.spec.of_choice(index),
            eos_token_ids=prompt.eos_token_ids,
            arrival_time=prompt.arrival_time,
            pixels=tuple(prompt.pixels.values()),
        )
    )
    choice.status = RequestStatus.WAITING
    return choice

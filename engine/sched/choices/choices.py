"""Lets the answers to one prompt begin, once their first tokens and its KV are here: choices as
soon as their tokens are known, beams with the candidates of the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.config import EngineConfig
from engine.contracts.messages import EngineCoreOutput
from engine.contracts.outputs import SiblingTokens, TokenLogprobs
from engine.contracts.request import Request, RequestStatus
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.choices.beams import Beams
from engine.sched.choices.forks import Forks
from engine.sched.request_limits import RequestLimits
from engine.sched.rows.row import Row
from engine.sched.rows.running import RunningRows
from engine.sched.step_fence import StepFence


class Finish(Protocol):
    """Ends a request wherever it is; `output` says so."""

    def __call__(
        self,
        request: Request,
        status: RequestStatus,
        stop_reason: int | None = None,
        *,
        output: EngineCoreOutput,
    ) -> None: ...


class Choices:
    """Acts for the scheduler, whose requests these are. `arrived`: prompts whose KV has come
    from a peer, all of it; `unreported`: requests whose first output is still to come."""

    def __init__(
        self,
        config: EngineConfig,
        limits: RequestLimits,
        kv_cache: KVCacheManager,
        fence: StepFence,
        running: RunningRows,
        arrived: list[Request],
        forks: Forks,
        requests: dict[str, Request],
        unreported: set[str],
        finish: Finish,
    ) -> None:
        self._limits = limits
        self._running = running
        self._arrived = arrived
        self._forks = forks
        self._requests = requests
        self._unreported = unreported
        self._finish = finish
        self.beams = Beams(config, kv_cache, fence, forks, limits, running, requests, self.discard)

    def prompt_done(self, row: Row, drawn: EngineCoreOutput) -> list[EngineCoreOutput]:
        """Lets the choices begin of a prompt that its row has computed, or goes on with the search
        of a beam. Returns the choices' first tokens, unless they have them, or the beams'
        answers."""
        prompt = row.request
        if row.is_seated:
            assert drawn.logprobs is not None
            return self.beams.advanced(row, drawn.logprobs[0])
        self._running.leave(row)
        if prompt.is_beam:
            return self.beams.computed(prompt, *(drawn.logprobs or ()))
        del prompt.all_token_ids[prompt.num_prompt_tokens :]
        self._share(prompt)
        if prompt.first_tokens:
            return []
        more = drawn.siblings or SiblingTokens([])
        logprobs = [*(drawn.logprobs or ()), *more.logprobs]
        return self.begin(prompt, [*drawn.new_token_ids, *more.token_ids], logprobs)

    def share_arrived(self) -> list[EngineCoreOutput]:
        """Shares prompts whose KV has come from a peer, once their first tokens are known. Returns
        the answers of beams that ended with it."""
        answers: list[EngineCoreOutput] = []
        while self._arrived:
            prompt = self._arrived.pop()
            if prompt.is_beam:
                answers += self.beams.computed(prompt)
            else:
                self._share(prompt)
        return answers

    def begin(
        self, prompt: Request, tokens: list[int], logprobs: Sequence[TokenLogprobs] = ()
    ) -> list[EngineCoreOutput]:
        """Gives each choice that is left its first token, which may be its last."""
        begun = self._forks.begin(prompt, tokens, logprobs)
        for choice, output in begun:
            if prompt.is_finished:
                self.report_first(choice, output)
            end = self._limits.end_at(choice, choice.num_tokens)
            if end is not None:
                self._finish(choice, *end, output=output)
        return [output for _, output in begun]

    def report_first(self, request: Request, output: EngineCoreOutput) -> None:
        """Puts into a request's first output what is sent once."""
        self._unreported.remove(request.request_id)
        output.num_cached_tokens = request.num_cached_tokens
        output.queue_s = max(0.0, request.first_scheduled_at - request.arrival_time)
        output.num_output_tokens_before = request.num_output_tokens - len(output.new_token_ids)

    def discard(self, request: Request) -> None:
        """Removes a request without an output."""
        unheard = EngineCoreOutput(request.request_id, [])
        self._finish(request, RequestStatus.FINISHED_ABORTED, output=unheard)

    def _share(self, prompt: Request) -> None:
        """Ends a prompt's request, whose choices take its blocks."""
        prompt.status = RequestStatus.FINISHED_LENGTH
        del self._requests[prompt.request_id]
        self._forks.share(prompt)

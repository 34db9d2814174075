"""Rows of beam searches: each step the best beams fork off from those before.

    PROMPT   the prompt's request is in a row, or its KV comes from a peer with the candidates of
             the first token, like any other request that asks for one token
    STEP     each beam is a request for one token behind those that it has. In its row it computes
             KV of its last token and tells its candidates; then it leaves the row, and its blocks
             wait. Once all beams of the step have done so, `BeamSearch` chooses the next ones: they
             fork off from the beams that they continue (`engine.sched.forks`), and blocks that
             nobody continues are free
    ENDED    the answers that were asked for leave at once, best first

             step 5   [ b0 ][ b1 ][ b2 ]     [ b0 ][ b1 ][ b3 ]
                        │ continued twice         ╳ by nobody
             step 6   [ b0 ][ b1 ][ b2 ]     [ b0 ][ b1 ][ b4 ]     b2 copied to b4, b3 free

- A beam that is preempted, or whose blocks were needed, computes alone what it has: tokens are all
  that the search knows of it, so that the answer stays the same. That holds for a whole search that
  begins again on another node, too.
- A search is one request to whoever asked: one name ends it, and it fails as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.messages import EngineCoreOutput, EngineCoreRequest
from engine.outputs import TokenLogprobs
from engine.request import Request, RequestStatus
from engine.request_spec import RequestSpec
from engine.sampling_params import SamplingParams
from engine.sched.beam_search import BeamSearch, Hypothesis
from engine.sched.forks import Forks
from engine.sched.request_limits import RequestLimits


@dataclass(slots=True, eq=False)
class BeamGroup:
    """One search. `prompt` is the prompt's request and `asked` what was wanted of it; `beams`
    compute or have computed the current step, `num_missing` of them have not yet, and `found` has
    the candidates of the others."""

    prompt: Request
    asked: SamplingParams
    names: tuple[str, ...]
    search: BeamSearch
    beams: list[Request]
    num_missing: int = 1
    step: int = 0
    found: dict[str, TokenLogprobs] = field(default_factory=dict)


class Beams:
    """Finds searches by the ids of their requests and of those who listen. `requests` are the
    scheduler's, `finish` ends one of them wherever it is."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        forks: Forks,
        limits: RequestLimits,
        requests: dict[str, Request],
        finish: Callable[[Request], None],
    ) -> None:
        self._kv_cache = kv_cache
        self._forks = forks
        self._limits = limits
        self._requests = requests
        self._finish = finish
        self._groups: dict[str, BeamGroup] = {}

    def add(self, prompt: Request) -> None:
        """Begins a search, if that is what the request asks for: its row is asked for the most
        likely first tokens from now on."""
        beam, sampling = prompt.sampling.beam, prompt.sampling
        if beam is None:
            return
        stop_ids = {*sampling.stop_token_ids}
        if not sampling.ignore_eos:
            stop_ids.update(prompt.eos_token_ids)
        max_tokens = self._limits.max_len(prompt) - prompt.num_prompt_tokens
        search = BeamSearch(beam, stop_ids, max_tokens, sampling.min_tokens, sampling.logprobs)
        names = prompt.choice_ids or (prompt.request_id,)
        group = BeamGroup(prompt, sampling, names, search, [prompt])
        for name in {prompt.request_id, *names}:
            self._groups[name] = group
        prompt.is_beam = True
        prompt.choice_ids = ()
        prompt.spec = prompt.spec.for_candidates(prompt.eos_token_ids)
        prompt.sampling = prompt.spec.sampling

    def knows(self, request_id: str) -> bool:
        return request_id in self._groups

    def supply(self, prompt: Request, candidates: TokenLogprobs) -> None:
        """Supplies the candidates of the first token, which the peer that computes the prompt has
        found."""
        group = self._groups[prompt.request_id]
        group.found[prompt.request_id] = candidates
        prompt.first_tokens = candidates.token_ids[:1]

    def computed(
        self, beam: Request, candidates: TokenLogprobs | None = None
    ) -> list[EngineCoreOutput]:
        """Notes that KV of all tokens of a beam is here, which has left its row or needs none, and
        what its candidates are, unless they are known. Returns the answers, if it was the last."""
        group = self._groups[beam.request_id]
        del beam.all_token_ids[beam.num_prompt_tokens :]
        beam.status = RequestStatus.FINISHED_LENGTH
        del self._requests[beam.request_id]
        self._kv_cache.confirm(beam, beam.num_prompt_tokens)
        self._forks.hold(beam)
        if candidates is not None:
            group.found.setdefault(beam.request_id, candidates)
        group.num_missing -= 1
        if group.num_missing:
            return []
        chosen = group.search.advance([group.found[one.request_id] for one in group.beams])
        return self._branch(group, chosen) if chosen else self._answers(group)

    def end(
        self, request_id: str, status: RequestStatus, error: str = ""
    ) -> list[EngineCoreOutput]:
        """Ends a search before its time. Returns what those hear who wait for it."""
        group = self._groups[request_id]
        self._forget(group)
        return [
            EngineCoreOutput(name, [], status.finish_reason, error=error) for name in group.names
        ]

    def leftovers(self) -> list[str]:
        return [f"beam search {name}" for name in self._groups]

    def _branch(self, group: BeamGroup, chosen: list[Hypothesis]) -> list[EngineCoreOutput]:
        group.step += 1
        group.num_missing = len(chosen)
        group.found.clear()
        parents, asked = group.beams, group.prompt
        spec = asked.spec.resumed_after(chosen[0].token_ids).for_one_token()
        group.beams = []
        successors: list[list[Request]] = [[] for _ in parents]
        for index, one in enumerate(chosen):
            name = f"{asked.request_id}/{group.step}.{index}"
            beam = _beam(asked, name, spec.resumed_after(one.token_ids))
            group.beams.append(beam)
            successors[one.parent].append(beam)
            self._requests[name] = beam
            self._groups[name] = group
        for parent, own in zip(parents, successors, strict=True):
            if parent is not asked:
                del self._groups[parent.request_id]
            self._forks.branch(parent, own)
        return []

    def _answers(self, group: BeamGroup) -> list[EngineCoreOutput]:
        prompt, asked = group.prompt, group.asked
        self._forget(group)
        assert asked.beam is not None
        outputs = []
        for name, one in zip(group.names, group.search.best[asked.beam.rank :], strict=False):
            last = one.token_ids[-1]
            ended = last in prompt.eos_token_ids and not asked.ignore_eos
            stopped = last in asked.stop_token_ids
            output = EngineCoreOutput(name, one.token_ids, "stop" if ended or stopped else "length")
            output.stop_reason = last if stopped and not ended else None
            output.logprobs = one.logprobs or None
            output.num_cached_tokens = prompt.num_cached_tokens
            output.queue_s = max(0.0, prompt.first_scheduled_at - prompt.arrival_time)
            outputs.append(output)
        return outputs

    def _forget(self, group: BeamGroup) -> None:
        """Gives up whatever the search has."""
        for beam in group.beams:
            if beam.request_id in self._requests:
                self._finish(beam)
            self._forks.drop(beam)
        for name in {group.prompt.request_id, *group.names, *(b.request_id for b in group.beams)}:
            del self._groups[name]


def _beam(asked: Request, name: str, spec: RequestSpec) -> Request:
    """Returns the request for the next token of one beam of the search that `asked` began."""
    beam = Request(
        EngineCoreRequest(
            request_id=name,
            spec=spec,
            eos_token_ids=asked.eos_token_ids,
            arrival_time=asked.arrival_time,
            pixels=tuple(asked.pixels.values()),
        )
    )
    beam.is_beam = True
    beam.arrival_order = asked.arrival_order
    beam.num_cached_tokens = asked.num_cached_tokens
    beam.first_scheduled_at = asked.first_scheduled_at
    return beam

"""Rows of beam searches: each step the best beams continue those before.

    PROMPT   the prompt's request is in a row, or its KV comes from a peer with the candidates of
             the first token, like any other request that asks for one token
    APART    each beam is a request for one token behind those that it has. In its row it computes
             KV of its last token and tells its candidates; then it leaves the row, and its blocks
             wait. Once all beams of the step have done so, `BeamSearch` chooses the next ones: they
             fork off from the beams that they continue (`forks.py` beside it), and blocks that
             nothing continues are free
    SEATED   all beams have got rows and blocks in one step, and keep them. They decode like other
             rows, step behind step; `engine.worker.rows.beam_rows` chooses who continues whom.
             From the candidates that come back, `BeamSearch` comes to the same beams: references
             to blocks move as tables have moved, and what nothing continues is free behind the
             steps in flight
    ENDED    the answers that were asked for leave at once, best first

    PROMPT ──▶ APART ◀──▶ SEATED ──▶ ENDED      APART if rows or blocks do not suffice for all beams

             step 5   [ b0 ][ b1 ][ b2 ]     [ b0 ][ b1 ][ b3 ]
                        │ continued twice         ╳ by none
             step 6   [ b0 ][ b1 ][ b2 ]     [ b0 ][ b1 ][ b4 ]     b2 copied to b4, b3 free
                                                           seated:  b2 copied to b3

- A beam that is preempted, or whose blocks were needed, computes alone what it has: tokens are all
  that the search knows of it, so that the answer stays the same. That holds for a whole search that
  begins again on another node, too. Seated beams are preempted together.
- A search is one request to its client: one name ends it, and it fails as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from engine.config import EngineConfig
from engine.contracts.messages import EngineCoreOutput, EngineCoreRequest
from engine.contracts.outputs import TokenLogprobs
from engine.contracts.request import Request, RequestStatus
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import BeamSeat
from engine.kv_cache.kept_states import BlockCopy
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.sched.choices.beam_search import BeamSearch, Hypothesis
from engine.sched.choices.beam_seats import seats_of
from engine.sched.choices.forks import Forks
from engine.sched.request_limits import RequestLimits
from engine.sched.rows.row import Row
from engine.sched.rows.running import RunningRows
from engine.sched.step_fence import StepFence


@dataclass(slots=True, eq=False)
class BeamGroup:
    """One search. `prompt` is the prompt's request and `asked` what was wanted of it, with up to
    `max_len` tokens; `beams` compute or have computed the current step, best first, `num_missing`
    of them have not yet, and `found` has the candidates of the others. `seats` are the rows that
    they keep, if they do: the workers' order, which beams change places in."""

    prompt: Request
    asked: SamplingParams
    names: tuple[str, ...]
    search: BeamSearch
    beams: list[Request]
    max_len: int
    stop_ids: tuple[int, ...]
    num_missing: int = 1
    step: int = 0
    found: dict[str, TokenLogprobs] = field(default_factory=dict)
    seats: list[Row] = field(default_factory=list)


class Beams:
    """Finds searches by the ids of their requests and of those who listen. `requests` are the
    scheduler's, `finish` ends one of them wherever it is."""

    def __init__(
        self,
        config: EngineConfig,
        kv_cache: KVCacheManager,
        fence: StepFence,
        forks: Forks,
        limits: RequestLimits,
        running: RunningRows,
        requests: dict[str, Request],
        finish: Callable[[Request], None],
    ) -> None:
        self._kv_cache = kv_cache
        self._fence = fence
        self._forks = forks
        self._limits = limits
        self._running = running
        self._running.unseat = self._unseat
        self._requests = requests
        self._finish = finish
        self._groups: dict[str, BeamGroup] = {}
        stages = config.parallel.pipeline_parallel_size
        self._seats_beams = config.decode_query_len == 1 and stages == 1
        """Drafts are of one beam, and stages learn of tokens late: there beams stay APART."""
        self._numbers = count()
        self._branched: list[BeamGroup] = []
        """Searches whose beams have just branched off, of which none has entered a row."""

    def add(self, prompt: Request) -> None:
        """Begins a search, if that is what the request asks for: its row is asked for the most
        likely first tokens from now on."""
        beam, sampling = prompt.sampling.beam, prompt.sampling
        if beam is None:
            return
        stop_ids = {*sampling.stop_token_ids}
        if not sampling.ignore_eos:
            stop_ids.update(prompt.eos_token_ids)
        max_len = self._limits.max_len(prompt)
        max_tokens = max_len - prompt.num_prompt_tokens
        search = BeamSearch(beam, stop_ids, max_tokens, sampling.min_tokens, sampling.logprobs)
        names = prompt.choice_ids or (prompt.request_id,)
        group = BeamGroup(
            prompt, sampling, names, search, [prompt], max_len, tuple(sorted(stop_ids))
        )
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
        """Ends a search before its time. Returns the outputs of its request."""
        group = self._groups[request_id]
        self._forget(group)
        return [
            EngineCoreOutput(name, [], status.finish_reason, error=error) for name in group.names
        ]

    # Seats ------------------------------------------------------------------------------------

    def take_branched(self) -> list[BeamGroup]:
        """Takes the searches whose beams could sit down now. Beams of those that do not enter rows
        one by one."""
        branched, self._branched = self._branched, []
        return branched

    def sit_down(
        self, group: BeamGroup, headroom: int
    ) -> tuple[list[BeamSeat], list[BlockCopy]] | None:
        """Takes all beams of a search out of their forks, with blocks. Returns their seats, and the
        copies to make before they compute. None, and nothing changed: `headroom` blocks would not
        stay free, or running rows have just needed theirs."""
        copies = self._forks.take_together(group.beams, headroom)
        if copies is None:
            return None
        number, width = next(self._numbers), len(group.beams)
        num_candidates = group.prompt.sampling.logprobs or 0
        seats = [
            BeamSeat(number, index, width, one.score, group.stop_ids, num_candidates)
            for index, one in enumerate(group.search.live)
        ]
        return seats, copies

    def seated(self, group: BeamGroup, rows: list[Row]) -> None:
        """Records that all beams of a search have entered `rows`, the best first."""
        group.seats = rows
        for row in rows:
            row.is_seated = True
            row.check_len = 0  # Every result counts.

    def advanced(self, row: Row, candidates: TokenLogprobs) -> list[EngineCoreOutput]:
        """Notes the candidates that a seated beam has found. Returns the answers, if it was the
        last of its search to do so and the search is over."""
        group = self._groups[row.request_id]
        group.found[row.request_id] = candidates
        if len(group.found) < len(group.seats):
            return []
        chosen = group.search.advance([group.found[one.request_id] for one in group.beams])
        group.found.clear()
        return self._change_places(group, chosen) if chosen else self._answers(group)

    def _change_places(
        self, group: BeamGroup, chosen: Sequence[Hypothesis]
    ) -> list[EngineCoreOutput]:
        """Does with tokens and references to blocks what workers have done with their tables."""
        at = {row.request_id: index for index, row in enumerate(group.seats)}
        parents = [at[group.beams[one.parent].request_id] for one in chosen]
        places = seats_of(parents)
        rows = [group.seats[place] for place in places]
        if any(row.tokens[-1] != one.token_ids[-1] for row, one in zip(rows, chosen, strict=True)):
            error = "workers have chosen other beams than the scheduler; report this as a bug"
            return self.end(group.prompt.request_id, RequestStatus.FINISHED_ERROR, error)
        first = group.prompt.num_prompt_tokens
        num_written = first + group.search.num_tokens - 1
        for row, parent, one in zip(rows, parents, chosen, strict=True):
            source = group.seats[parent]
            if source is not row:
                lost = self._kv_cache.adopt(row.request, source.request, num_written)
                self._fence.release(lost)
                row.tokens[first:] = one.token_ids
        if num_written % self._kv_cache.least_block_size == 0:
            for row in rows:
                self._kv_cache.confirm(row.request, num_written)
        group.beams = [row.request for row in rows]
        return []

    def _unseat(self, row: Row) -> None:
        """Takes the rows and blocks of a search: its beams wait, and compute what they have."""
        group = self._groups[row.request_id]
        for one in group.seats:
            self._running.leave(one)
            self._fence.release(self._kv_cache.take_blocks(one.request_id))
            one.request.status = RequestStatus.FINISHED_LENGTH
            del self._requests[one.request_id]
        group.seats = []
        before = group.beams
        for beam, successor in zip(before, self._begin_step(group, group.search.live), strict=True):
            self._forks.branch(beam, [successor])

    def leftovers(self) -> list[str]:
        return [f"beam search {name}" for name in self._groups]

    def _branch(self, group: BeamGroup, chosen: list[Hypothesis]) -> list[EngineCoreOutput]:
        parents = group.beams
        successors: list[list[Request]] = [[] for _ in parents]
        for one, beam in zip(chosen, self._begin_step(group, chosen), strict=True):
            successors[one.parent].append(beam)
        is_whole = self._seats_beams and len(chosen) == group.search.width
        for parent, own in zip(parents, successors, strict=True):
            is_whole &= not own or self._forks.is_held(parent)
            self._forks.branch(parent, own)
        if is_whole:
            self._branched.append(group)
        return []

    def _begin_step(self, group: BeamGroup, chosen: list[Hypothesis]) -> list[Request]:
        """Returns the requests of beams that are apart, in the order of `chosen`."""
        group.step += 1
        group.num_missing = len(chosen)
        group.found.clear()
        asked = group.prompt
        spec = asked.spec.resumed_after(chosen[0].token_ids).for_one_token()
        for parent in group.beams:
            if parent is not asked:
                del self._groups[parent.request_id]
        group.beams = []
        for index, one in enumerate(chosen):
            name = f"{asked.request_id}/{group.step}.{index}"
            beam = _beam(asked, name, spec.resumed_after(one.token_ids))
            group.beams.append(beam)
            self._requests[name] = beam
            self._groups[name] = group
        return group.beams

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
        if group in self._branched:
            self._branched.remove(group)
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

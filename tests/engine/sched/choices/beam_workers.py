"""Workers that compute nothing: candidates of beams and first tokens of choices are random."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch

from engine.contracts.messages import EngineCoreRequest
from engine.contracts.outputs import ModelRunnerOutput, RowSiblings, SiblingTokens, TokenLogprobs
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import BeamParams, SamplingParams
from engine.contracts.scheduler_output import NewRequestData, SchedulerOutput
from engine.sample.beam_choice import choose_beams
from tests.engine.sched.llama_steps import Workers

NUM_TOKENS = 128
"""The length of each answer, in tokens."""


@dataclass(slots=True)
class Seats:
    """A search whose beams keep their rows, by seat."""

    rows: list[int]
    scores: list[float]
    ranks: list[int]

    def choose(self, result: ModelRunnerOutput) -> None:
        """Puts the next beams' tokens in the place of those that were drawn. Nothing ends them."""
        places = [result.rows.index(row) for row in self.rows]
        found = [result.logprobs[place] for place in places]
        chosen = choose_beams(
            torch.tensor([[one.token_ids[1:] for one in found]]),
            torch.tensor([[one.logprobs[1:] for one in found]], dtype=torch.float32),
            torch.tensor([self.scores], dtype=torch.float64),
            torch.tensor([self.ranks]),
            torch.full((1, 1), -1),
        )
        self.scores, self.ranks = chosen.scores[0].tolist(), chosen.ranks[0].tolist()
        for place, token_id in zip(places, chosen.token_ids[0].tolist(), strict=True):
            result.token_ids[place] = token_id


class Guesses(Workers):
    """Answers with candidates where they are wanted, and with first tokens of choices."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._new: dict[int, NewRequestData] = {}  # [row]
        self._seats: dict[int, Seats] = {}  # [number of the search]

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        result = super().execute(step)
        for row in step.finished_rows:
            seat = self._new.pop(row).beam
            if seat is not None:
                self._seats.pop(seat.search, None)
        for new in step.new_reqs:
            self._enter(new)
        self._guess(result)
        for seats in self._seats.values():
            if seats.rows[0] in result.rows:
                seats.choose(result)
        return result

    def _enter(self, new: NewRequestData) -> None:
        self._new[new.row] = new
        if new.beam is not None:
            seats = self._seats.setdefault(new.beam.search, Seats([], [], []))
            seats.rows.append(new.row)
            seats.scores.append(new.beam.score)
            seats.ranks.append(new.beam.index)

    def _guess(self, result: ModelRunnerOutput) -> None:
        for index, row in enumerate(result.rows):
            new = self._new[row]
            if more := new.sibling_seeds:
                tokens = [self._rng.randrange(100_000) for _ in more]
                result.siblings.append(
                    RowSiblings(row, result.epochs[index], SiblingTokens(tokens))
                )
            if new.sampling.logprobs is not None:
                tokens = self._rng.sample(range(1, 100_000), new.sampling.logprobs)
                scores = sorted((-4 * self._rng.random() for _ in tokens), reverse=True)
                scores = torch.tensor(scores, dtype=torch.float32).tolist()
                found = TokenLogprobs([tokens[0], *tokens], [scores[0], *scores], 1)
                result.logprobs[index] = found


def asked(kind: str, index: int, width: int, prompt: list[int]) -> EngineCoreRequest:
    """Returns a request for `width` answers of `NUM_TOKENS` tokens: beams or sampled choices."""
    beam = BeamParams(width) if kind == "beams" else None
    sampling = SamplingParams(
        temperature=0.0 if beam else 1.0,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        beam=beam,
    )
    return EngineCoreRequest(
        request_id=f"{index:032x}",
        spec=RequestSpec(prompt, sampling, sibling_seeds=tuple(range(1, width))),
        choice_ids=tuple(f"{index:030x}.{i}" for i in range(width)),
        arrival_time=time.monotonic(),
    )

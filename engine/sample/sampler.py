"""Turns logits into the next tokens of each request.

Rows come and go with the same verbs as all state of the worker. One step:

    1. keep raw logits of requests that want log probabilities
    2. logit bias, and -inf on ending tokens before `min_tokens`
    3. penalties
    4. -inf on tokens that a grammar forbids, or that are not allowed, then on those that complete a
       bad word, or a sequence that the output has already
    5. temperature, min-p, top-k, top-p, and the draw keyed by (seed, position): one operation
    6. count the new tokens of requests with penalties: drafts that were right, and one more
    7. log probabilities
    8. first tokens of further answers to the same prompt, drawn from the same logits

Steps 1 to 5 choose a token at each place (see `engine.batch.places`). Steps 1 to 4, 6 and 7 cost
nothing in a batch where no request needs them. The host decides that from its own copy of the
parameters. `draw` alone is step 5: it needs nothing of the host, so a CUDA graph may hold it.
Step 4 alone may wait, for the tokens of the step before: see `engine.sample.grammars`.

Ranks that have a part of the vocabulary each sample from their parts (`VocabPart`) what does not
need the whole: see `needs_whole`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from engine.batch.buffer_utils import CarriedTensor
from engine.batch.input_batch import InputBatch
from engine.batch.places import Int32Array, Places
from engine.contracts.scheduler_output import NewRequestData
from engine.layers.vocabulary.vocab_part import VocabPart
from engine.sample.allowed_tokens import AllowedTokenStates
from engine.sample.bad_words import BadWordStates
from engine.sample.grammars import GrammarStates, PlaceFailure
from engine.sample.logit_bias import LogitBiasStates
from engine.sample.logprobs import LogprobsRequest, LogprobsTensors
from engine.sample.penalties import PenaltyStates
from engine.sample.repeated_ngrams import RepeatedNgramStates
from engine.sample.siblings import SiblingStates, SiblingTensors
from engine.sample.states import NO_LOGPROBS, SamplingStates
from tandem_kernels import ops


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Results of the S requests of a batch that sample, on the device."""

    token_ids: torch.Tensor
    """[S, W] int64, what each of them gets, then -1. W is `decode_query_len`."""
    logprobs: LogprobsTensors | None
    """Log probabilities, or None when nothing asked."""
    siblings: SiblingTensors | None = None
    """Tokens of further answers, where rows draw for several."""
    failures: dict[int, PlaceFailure] = field(default_factory=dict)
    """Requests that cannot go on, by index in the batch."""
    num_drafts: torch.Tensor | None = None
    """[S] int32, drafts that were proposed for this step; None when nothing drafts."""
    draft_features: torch.Tensor | None = None
    """[S, F], what a drafter on another node needs to go on; None on most nodes."""


class Sampler:
    """Owns everything about rows that only sampling needs."""

    def __init__(
        self,
        max_num_reqs: int,
        vocab_size: int,
        device: torch.device,
        deterministic: bool = False,
        *,
        token_ids: torch.Tensor,
        grammars: GrammarStates,
        splits_vocabulary: bool = False,
    ) -> None:
        """Builds the sampler over `token_ids` [rows, L]: all tokens of each row, which grow by what
        is sampled here. `splits_vocabulary`: logits come as `VocabPart` to `draw` and to steps.
        """
        self._deterministic = deterministic
        self._splits_vocabulary = splits_vocabulary
        self._params = SamplingStates(max_num_reqs, device)
        self.penalties = PenaltyStates(max_num_reqs, vocab_size, device)
        self._logit_bias = LogitBiasStates(max_num_reqs, device)
        self.grammars = grammars
        self._allowed = AllowedTokenStates(max_num_reqs, vocab_size, device)
        self._bad_words = BadWordStates(max_num_reqs, token_ids)
        self._ngrams = RepeatedNgramStates(max_num_reqs, token_ids)
        self._siblings = SiblingStates(device)
        self._changing = (
            self._logit_bias,
            self.penalties,
            self.grammars,
            self._allowed,
            self._bad_words,
            self._ngrams,
        )
        """All that change logits, in their order."""

    def add_request(self, new: NewRequestData) -> None:
        tokens = np.frombuffer(new.prefill_token_ids, "<i4")
        num_of_prompt = max(0, new.prompt_len - new.first_token)
        prompt, output = tokens[:num_of_prompt], tokens[num_of_prompt:]
        self._params.add_request(new.row, new.sampling)
        self.penalties.add_request(new.row, new.sampling, prompt, output)
        self._logit_bias.add_request(new.row, new.sampling, new.prompt_len, new.eos_token_ids)
        self.grammars.add_request(new, output)
        self._allowed.add_request(new.row, new.sampling)
        self._bad_words.add_request(new.row, new.sampling, new.prompt_len)
        self._ngrams.add_request(new.row, new.sampling, new.prompt_len)
        self._siblings.add_request(new)

    @property
    def carried(self) -> list[CarriedTensor]:
        """Returns the arrays that are carried over before a step."""
        return [*self._params.carried, *self.penalties.carried]

    def remove_request(self, row: int) -> None:
        for states in (self._params, *self._changing, self._siblings):
            states.remove_request(row)

    def __call__(self, logits: torch.Tensor | VocabPart, batch: InputBatch) -> SamplerOutput:
        """Chooses tokens. `logits` [L, V] are float32 of the places of `batch`, or this rank's part
        of them; may be changed."""
        places = batch.places()
        rows = places.rows
        if isinstance(logits, VocabPart) and self.needs_whole(rows):
            logits = logits.whole()
        changes = self._changes_logits(rows)
        wanted = self._params.logprobs_wanted(rows)
        logprobs = None
        if (wanted != NO_LOGPROBS).any():
            assert not isinstance(logits, VocabPart)
            named = self._params.logprob_token_ids(rows)
            logprobs = LogprobsRequest(logits, wanted, places.cells(), keep=changes, named=named)
        failures = self._change_logits(logits, places) if changes else {}
        has_filters = self._params.has_filters(rows)
        chosen = self.draw(logits, places.idx_mapping, places.seq_lens, has_filters)
        siblings = None
        if self._siblings.needed_by(rows):
            assert not isinstance(logits, VocabPart)
            siblings = self._siblings.draw(
                logits, places, partial(self._draw_for, has_filters), logprobs
            )
        token_ids = places.accept(chosen)
        if self.penalties.needed_by(rows):
            self.penalties.count(token_ids, batch.idx_mapping[: len(token_ids)])
        found = None if logprobs is None else logprobs.compute(chosen)
        return SamplerOutput(token_ids, found, siblings, failures)

    def needs_whole(self, rows: Int32Array) -> bool:
        """Returns whether a step of `rows` needs all logits of each place on every rank: for
        filters, whose sums over candidates depend on their order; for bad words and repetitions,
        which ask whether anything else is left; for further answers, which are drawn a few at a
        time; for log probabilities, since to gather is quicker than the exchanges that would find
        them in parts (docs/experiments.md)."""
        return (
            self._params.has_filters(rows)
            or self._bad_words.needed_by(rows)
            or self._ngrams.needed_by(rows)
            or self._siblings.needed_by(rows)
            or self._wants_logprobs(rows)
        )

    def only_draws(self, rows: Int32Array) -> bool:
        """Returns whether `draw` is all that `rows` need; of a split vocabulary, without filters,
        for which a rank must see all logits."""
        return not (
            self._changes_logits(rows)
            or (self._splits_vocabulary and self._params.has_filters(rows))
            or self._siblings.needed_by(rows)
            or self._wants_logprobs(rows)
        )

    def _wants_logprobs(self, rows: Int32Array) -> bool:
        return bool((self._params.logprobs_wanted(rows) != NO_LOGPROBS).any())

    def _changes_logits(self, rows: Int32Array) -> bool:
        return any(states.needed_by(rows) for states in self._changing)

    def _change_logits(
        self, given: torch.Tensor | VocabPart, places: Places
    ) -> dict[int, PlaceFailure]:
        """Changes the logits. Bad words and repetitions come last: they ask whether anything else
        is left. Returns the requests that grammars leave nothing to choose from."""
        logits = given.logits if isinstance(given, VocabPart) else given
        first = given.cut.start if isinstance(given, VocabPart) else 0
        rows = places.rows
        failures: dict[int, PlaceFailure] = {}
        if self._logit_bias.needed_by(rows):
            self._logit_bias.apply(logits, places, first)
        if self.penalties.needed_by(rows):
            self.penalties.apply(logits, places, first)
        if self.grammars.needed_by(rows):
            failures = self.grammars.apply(logits, places, first)
        if self._allowed.needed_by(rows):
            self._allowed.apply(logits, rows, first)
        if self._bad_words.needed_by(rows):
            self._bad_words.apply(logits, rows, places.seq_lens)
        if self._ngrams.needed_by(rows):
            self._ngrams.apply(logits, places)
        return failures

    def draw(
        self,
        logits: torch.Tensor | VocabPart,
        idx_mapping: torch.Tensor,
        seq_lens: torch.Tensor,
        has_filters: bool = True,
    ) -> torch.Tensor:
        """Returns [L] int64 from `logits` [L, V] of the rows `idx_mapping` [L], below 0 none's,
        with `seq_lens` [L] tokens before each place: a new token's index. `has_filters`: False
        promises that no row cuts its distribution, as a part of the vocabulary does."""
        if isinstance(logits, VocabPart):
            params = self._params.gather(idx_mapping, seq_lens)
            return logits.best(params.temperature, params.seeds, params.positions)
        return self._draw_for(has_filters, logits, idx_mapping, seq_lens)

    def _draw_for(
        self,
        has_filters: bool,
        logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        seq_lens: torch.Tensor,
        seeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draws with `seeds` [L] in place of the rows' own, if given."""
        params = self._params.gather(idx_mapping, seq_lens)
        return ops.sample(
            logits,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.seeds if seeds is None else seeds,
            params.positions,
            has_filters,
            self._deterministic,
        )

"""Masks of the requests that follow a grammar, made on the host while the forward pass runs.

    1. `add_request`   compiling begins, in a thread; the output so far is replayed
    2. `apply`         behind the launch of the forward pass: waits for the tokens of the step
                       before and consumes them, fills a mask for each place, in parallel, in pinned
                       memory, and copies the masks to the device, where logits are changed
    3. `step_started`  notes whose result has the tokens that the next `apply` needs
    4. `remove_request`

The mask behind token t needs token t, so a step with grammars waits for the result of the step
before it: the host is one step ahead of the device then, not two. Ranks do all of this alike, each
for itself, and nothing of it is on the wire.

A place at which no token may be chosen is a failure of its request alone, which ends with it; the
device goes on with some token, which nothing gets.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import llguidance
import numpy as np
import torch

from engine.batch.places import NO_TOKEN, Int32Array, Places
from engine.contracts.outputs import GrammarStats
from engine.contracts.scheduler_output import NewRequestData
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.row_grammar import RowGrammar
from engine.sample.allowed_tokens import bit_mask
from tandem_kernels import ops

_NO_MASK = -1
_NUM_FORCED = 2
"""Steps full of tokens that are looked ahead where a grammar leaves no choice."""


class PlaceFailure(NamedTuple):
    """A request gets no token at its `place`-th place of a step, and none behind it."""

    place: int
    reason: str


class StepTokens(Protocol):
    """The part of a step's result that is needed here."""

    def wait_for_tokens(self) -> list[tuple[int, int, list[int]]]:
        """Returns (row, epoch, its tokens) for each request that sampled. Waits for the device."""


@dataclass(slots=True)
class _Walk:
    """The way through a request's places of one step."""

    request: int
    """Index in the batch."""
    grammar: RowGrammar
    first_place: int
    drafts: list[int]
    num_consumed: int = 0
    """Drafts that the matcher has consumed."""


class CopiedTensor:
    """An int32 tensor that the host writes, as `np`, and its copy on the device. Both are allocated
    once: pinning memory later would stop the device."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._on_host = torch.zeros(shape, dtype=torch.int32, pin_memory=is_cuda)
        self.np: Int32Array = self._on_host.numpy()
        self.on_device = torch.zeros(shape, dtype=torch.int32, device=device)

    def copy(self, count: int) -> None:
        """Copies the first `count` rows. The host does not wait for it."""
        self.on_device[:count].copy_(self._on_host[:count], non_blocking=True)


class GrammarStates:
    """Rows with a grammar. `num_threads`: masks that are filled at a time. `query_len`: places of a
    decode."""

    def __init__(
        self,
        max_num_reqs: int,
        vocab_size: int,
        device: torch.device,
        compiler: GrammarCompiler,
        num_threads: int,
        query_len: int = 1,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._compiler = compiler
        self._threads = llguidance.LLExecutor(num_threads)
        self._rows: dict[int, RowGrammar] = {}
        self._has_grammar = np.zeros(max_num_reqs, np.bool_)  # [row]
        self._latest: StepTokens | None = None
        """The result of the latest step with masks, if its tokens were not consumed yet."""
        max_places = max_num_reqs * query_len
        self._masks = CopiedTensor((max_places, -(-vocab_size // 32)), device)
        self._entries = CopiedTensor((max_places,), device)
        """The mask of each place of a batch."""
        self._query_len = query_len
        self._forced = CopiedTensor((max_num_reqs, _NUM_FORCED * query_len), device)
        self._num_forced = 0
        """The requests of the latest batch of which it is known what is forced."""
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.stats = GrammarStats()
        self.waited_s = 0.0
        """Seconds in which a step waited for the tokens of the one before."""

    @property
    def num_held(self) -> int:
        """Returns the number of rows that have a grammar."""
        return len(self._rows)

    def prepare(self) -> None:
        """Makes what all grammars need, in a thread."""
        self._compiler.prepare()

    def wait_until_prepared(self) -> None:
        """Waits for that thread, which lets no other one run for a while."""
        self._compiler.wait_until_prepared()

    def close(self) -> None:
        """Stops compiling. Idempotent."""
        self._compiler.close()

    def add_request(self, new: NewRequestData, output: Int32Array) -> None:
        """Adds a request with its `output` so far; one without a grammar changes nothing."""
        sampling = new.sampling
        if not sampling.grammar:
            return
        allowed = endings = None
        if sampling.allowed_token_ids is not None:
            allowed = bit_mask(sampling.allowed_token_ids, self._vocab_size)
        if sampling.min_tokens > 0:
            endings = bit_mask((*new.eos_token_ids, *sampling.stop_token_ids), self._vocab_size)
        self._rows[new.row] = RowGrammar(
            self._compiler,
            sampling.grammar,
            epoch=new.epoch,
            output=output.tolist(),
            eos_token_ids=new.eos_token_ids,
            allowed=allowed,
            endings=endings,
            min_tokens=sampling.min_tokens,
        )
        self._has_grammar[new.row] = True

    def remove_request(self, row: int) -> None:
        """Removes a request; a row without a grammar is left alone."""
        grammar = self._rows.pop(row, None)
        if grammar is not None:
            grammar.close()
            self._has_grammar[row] = False

    def needed_by(self, rows: Int32Array) -> bool:
        """Returns whether any of `rows` follows a grammar."""
        return bool(self._rows) and bool(self._has_grammar[rows].any())

    def step_started(self, result: StepTokens) -> None:
        """Takes the result of the step whose masks were the last."""
        self._latest = result

    def apply(
        self, logits: torch.Tensor, places: Places, first_token: int = 0
    ) -> dict[int, PlaceFailure]:
        """Sets what grammars forbid to -inf in `logits` [L, v] of all places, which are of tokens
        `first_token`, a multiple of 32, and on. Returns what fails, by index of the request in the
        batch."""
        self._consume_latest()
        walks, failures = self._begin(places)
        if not walks:
            return failures
        started = time.perf_counter()
        num_places = len(places.rows)
        if self._query_len > 1:
            self._find_forced(walks, len(places.first_places()))
        num_masks = self._fill(walks, failures, num_places)
        self._copy(num_masks, num_places)
        masks = self._masks.on_device[:, first_token // 32 :]
        ops.mask_logits(logits, masks, self._entries.on_device[:num_places])
        self.stats.masks_filled(num_masks, time.perf_counter() - started)
        return failures

    def take_forced(self) -> torch.Tensor | None:
        """Returns [S, N] int32: the tokens behind the output that each request of the latest batch
        had before it which are forced, then -1. None: there are none, or they were taken."""
        count, self._num_forced = self._num_forced, 0
        return self._forced.on_device[:count] if count else None

    def _find_forced(self, walks: list[_Walk], num_reqs: int) -> None:
        """Finds out what is forced, before any draft is consumed."""
        forced = self._forced.np[:num_reqs]
        forced[:] = NO_TOKEN
        for walk in walks:
            tokens = walk.grammar.forced_tokens(forced.shape[1])
            forced[walk.request, : len(tokens)] = tokens
        if (forced[:, 1:] != NO_TOKEN).any():
            self._num_forced = num_reqs

    def _consume_latest(self) -> None:
        """Consumes the tokens of the step before. Afterwards the device is done with its masks,
        too, so their memory may be written again."""
        if self._latest is None:
            return
        started = time.perf_counter()
        tokens = self._latest.wait_for_tokens()
        self.waited_s += time.perf_counter() - started
        new: list[tuple[RowGrammar, list[int]]] = []
        for row, epoch, token_ids in tokens:
            grammar = self._rows.get(row)
            if grammar is not None and grammar.epoch == epoch:
                new.append((grammar, token_ids))
        for index in range(max((len(token_ids) for _, token_ids in new), default=0)):
            self._consume([(one, ids[index]) for one, ids in new if index < len(ids)])
        self._latest = None

    def _consume(self, new: list[tuple[RowGrammar, int]]) -> None:
        """Consumes one token for each of some grammars."""
        kept = [(grammar, token_id) for grammar, token_id in new if grammar.append(token_id)]
        if not kept:
            return
        jobs = [(grammar.matcher, token_id) for grammar, token_id in kept]
        accepted = self._threads.consume_token_par(jobs)
        for (grammar, _), is_accepted in zip(kept, accepted, strict=True):
            if not is_accepted:
                grammar.fail()
                self.stats.num_failed += 1

    def _begin(self, places: Places) -> tuple[list[_Walk], dict[int, PlaceFailure]]:
        """Waits for what is not compiled yet. Returns the requests whose masks are to be filled,
        and those that have failed."""
        walks: list[_Walk] = []
        failures: dict[int, PlaceFailure] = {}
        drafts, firsts = places.drafts_on_host(), places.first_places()
        for request in np.flatnonzero(self._has_grammar[places.rows[firsts]]).tolist():
            first = int(firsts[request])
            grammar = self._rows[int(places.rows[first])]
            self._wait_for(grammar)
            if grammar.failure:
                failures[request] = PlaceFailure(0, grammar.failure)
            elif grammar.needs_masks:
                own = drafts[request] if request < len(drafts) else []
                walks.append(_Walk(request, grammar, first, own))
        return walks, failures

    def _wait_for(self, grammar: RowGrammar) -> None:
        started = time.perf_counter()
        seconds = grammar.wait()
        if seconds is not None:
            waited = time.perf_counter() - started
            self.stats.compiled(seconds, waited, failed=bool(grammar.failure))

    def _fill(self, walks: list[_Walk], failures: dict[int, PlaceFailure], num_places: int) -> int:
        """Fills masks, place by place of all requests together, and says which of them each place
        has. Returns their number."""
        entries = self._entries.np[:num_places]
        entries[:] = _NO_MASK
        num_masks, place, going_on = 0, 0, walks
        while going_on:
            words = self._masks.np[num_masks : num_masks + len(going_on)]
            self._compute([walk.grammar.matcher for walk in going_on], words)
            still: list[_Walk] = []
            for index, walk in enumerate(going_on):
                reason = walk.grammar.check_mask(words[index], place)
                if reason:
                    failures[walk.request] = PlaceFailure(place, reason)
                    continue
                entries[walk.first_place + place] = num_masks + index
                if place < len(walk.drafts) and walk.grammar.consume_draft(
                    walk.drafts[place], words[index]
                ):
                    walk.num_consumed += 1
                    still.append(walk)
            num_masks, place, going_on = num_masks + len(going_on), place + 1, still
        self._go_back(walks, failures)
        return num_masks

    def _copy(self, num_masks: int, num_places: int) -> None:
        """Copies on a stream of its own: beside the forward pass, not behind it. Who read these
        copies last, the step before, has ended: its tokens are known."""
        stream = self._copies
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            self._masks.copy(num_masks)
            self._entries.copy(num_places)
            self._forced.copy(self._num_forced)
        if stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def _go_back(self, walks: list[_Walk], failures: dict[int, PlaceFailure]) -> None:
        """Leaves every matcher behind its output."""
        for walk in walks:
            failure = failures.get(walk.request)
            if failure is not None and failure.place == 0:
                walk.grammar.fail(failure.reason)
                self.stats.num_failed += 1
            elif walk.drafts:
                walk.grammar.forget_drafts(walk.num_consumed)

    def _compute(self, matchers: list[llguidance.LLMatcher], words: Int32Array) -> None:
        """Fills `words` [N, ceil(V / 32)], one row for each of N matchers."""
        jobs = [(matcher, index) for index, matcher in enumerate(matchers)]
        self._threads.unsafe_compute_mask_ptr(
            jobs, words.ctypes.data, words.shape[1] * words.itemsize, len(jobs)
        )

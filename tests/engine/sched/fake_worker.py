"""A worker whose model is a hash, so that wrong KV is seen at once.

The "KV" of a token is a number that depends on it and on all tokens before it. Computing a token
reads the KV of every earlier position through the row's block table and compares it with what it
must be: a block that belongs to somebody else, was freed too early or written late, shows. The
next token is a function of that number, so each request's output is a pure function of its
prompt and sampling parameters.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from engine.contracts.outputs import (
    ModelRunnerOutput,
    PromptLogprobs,
    RowPromptLogprobs,
    RowSiblings,
    SiblingTokens,
)
from engine.contracts.request import Request
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import NewRequestData, SchedulerOutput
from kv_transfer.layout import BlockIds, KVGroup
from tests.engine.sched.factories import VOCAB_SIZE

_START = 1


def kv_of(tokens: Sequence[int], behind: list[int] | None = None) -> list[int]:
    """Returns the KV of each position, of tokens that may stand behind some whose KV is known."""
    states = []
    state = behind[-1] if behind else _START
    for token in tokens:
        state = hash((state, token))
        states.append(state)
    return states


def prompt_ranks(prompt: list[int]) -> list[int]:
    """Returns the ranks of each token but the first."""
    return [state % 1000 + token for state, token in zip(kv_of(prompt), prompt[1:], strict=False)]


def next_token(
    state: int, num_output: int, sampling: SamplingParams, eos_token_ids: tuple[int, ...]
) -> int:
    """Returns the token after one with this KV. Ends are masked before `min_tokens`, as on real
    workers. Seeds differ in what they draw.
    """
    masked = set(sampling.stop_token_ids) | set(eos_token_ids)
    draw = hash((state, sampling.seed))
    while True:
        draw = hash((draw, 97))
        token = draw % VOCAB_SIZE
        if num_output >= sampling.min_tokens or token not in masked:
            return token


def expected_output(request: Request, max_len: int) -> list[int]:
    """Returns what an engine of this context length must answer."""
    sampling = request.sampling
    ends = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        ends |= set(request.eos_token_ids)
    tokens = list(request.all_token_ids[: request.num_prompt_tokens])
    output: list[int] = []
    state = kv_of(tokens)[-1]
    while len(output) < sampling.max_tokens and len(tokens) < max_len:
        token = next_token(state, len(output), sampling, request.eos_token_ids)
        state = hash((state, token))
        tokens.append(token)
        output.append(token)
        if token in ends and len(output) >= sampling.min_tokens:
            break
    return output


class PagedMemory:
    """Remembers KV: `slots[block][offset]` is (KV group, KV) that was written there last."""

    def __init__(self, num_blocks: int, groups: tuple[KVGroup, ...]) -> None:
        self.groups = groups
        size = max(group.rows_per_block for group in groups)
        self.slots: list[list[tuple[int, int] | None]] = [[None] * size for _ in range(num_blocks)]
        self._known_places: list[list[tuple[int, int]]] = [[] for _ in groups]

    def write(
        self,
        block_ids: BlockIds,
        position: int,
        state: int,
        num_received: int | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """Writes into the blocks of all groups; where a row stands for several tokens, with the
        last of these. `num_received`: a peer sends so many tokens, and of a window only what the
        next one sees; `whole`: with all of its first block.
        """
        for index, (group, table) in enumerate(zip(self.groups, block_ids, strict=True)):
            if num_received is not None:
                first = group.first_token_seen(num_received)
                first -= first % group.block_size if whole and not group.is_state else 0
                if position < first:
                    continue
            if (position + 1) % group.compress_ratio:
                continue
            logical, offset = self._places(index, position + 1)[position]
            if table[logical] >= 0:
                self.slots[table[logical]][offset] = (index, state)

    def check(self, block_ids: BlockIds, states: list[int], num_tokens: int, seen_by: int) -> None:
        """Checks that, of the first `num_tokens` tokens, those that token `seen_by` sees have their
        KV.
        """
        for index, (group, table) in enumerate(zip(self.groups, block_ids, strict=True)):
            first, ratio = group.first_token_seen(seen_by), group.compress_ratio
            places = self._places(index, num_tokens)
            for position in range(first + ratio - 1, num_tokens, ratio):
                logical, offset = places[position]
                found = self.slots[table[logical]][offset]
                assert found == (index, states[position]), f"wrong KV at {position} of {index}"

    def _places(self, index: int, count: int) -> list[tuple[int, int]]:
        """Returns `_place` of `count` positions or more of a group."""
        known = self._known_places[index]
        while len(known) < count:
            known.append(_place(self.groups[index], len(known)))
        return known


def _place(group: KVGroup, position: int) -> tuple[int, int]:
    """Returns (logical block, row in it). A state has one row, which every token overwrites."""
    logical, offset = divmod(position, group.block_size)
    return logical, offset // group.compress_ratio % group.rows_per_block


Drafter = Callable[[list[int]], list[int]]
"""The drafts that it proposes, given what is right."""


def lying_drafter(rng: random.Random) -> Drafter:
    """Proposes tokens that are right up to a random place; then nothing more, a wrong one, one
    that no vocabulary has, and right ones again."""

    def propose(truth: list[int]) -> list[int]:
        drafts = list(truth)
        place = rng.randint(0, len(drafts))
        if place < len(drafts):
            lie = rng.choice(["few", "wrong", "large", "negative"])
            if lie == "few":
                del drafts[place:]
            else:
                wrong = (drafts[place] + 1) % VOCAB_SIZE
                drafts[place] = {"wrong": wrong, "large": 2**31 - 1, "negative": -7}[lie]
        return drafts

    return propose


def planted_drafter(rng: random.Random, acceptance: float) -> Drafter:
    """Proposes tokens each of which is right with that probability."""

    def propose(truth: list[int]) -> list[int]:
        return [token if rng.random() < acceptance else (token + 1) % VOCAB_SIZE for token in truth]

    return propose


@dataclass(slots=True)
class WorkerRow:
    """Holds what a worker keeps of a request."""

    epoch: int
    prompt_len: int
    prefill_len: int
    tokens: list[int]
    num_computed: int
    block_ids: BlockIds
    max_len: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    sibling_seeds: tuple[int, ...]
    is_garbage: bool = False
    """Its KV was never right: nobody may see its tokens, or find its blocks."""
    states: list[int] = field(default_factory=list)
    """The right KV of its first tokens."""


class FakeWorker:
    """Applies step messages exactly in the order of `engine.contracts.scheduler_output`. Rows that
    decode compute `query_len` tokens a step: the last one, and what `drafter` drafts."""

    def __init__(
        self, memory: PagedMemory, query_len: int = 1, drafter: Drafter | None = None
    ) -> None:
        self.memory = memory
        self.query_len = query_len
        self.drafter = drafter
        self.rows: dict[int, WorkerRow] = {}
        self.decode_set: set[int] = set()
        self.last_step_id = -1
        self.message_bytes: list[int] = []
        self.num_copies = 0
        self.reads_garbage = False
        """The next step computes with KV whose load has failed."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Raises AssertionError when the step asks for anything impossible."""
        wire = msgspec.msgpack.encode(step)
        self.message_bytes.append(len(wire))
        step = msgspec.msgpack.decode(wire, type=SchedulerOutput)
        assert step.step_id == self.last_step_id + 1
        self.last_step_id = step.step_id
        self._apply(step)
        output = ModelRunnerOutput(step.step_id, [], [], [], counts=[])
        for index, count in step.prefill_chunks:
            row = self.rows[index]
            row.is_garbage = row.is_garbage or self.reads_garbage
            assert index not in self.decode_set
            assert 1 <= count <= row.prefill_len - row.num_computed
            self._compute(row, count)
            self._look_up(index, row, count, output)
            if row.num_computed == row.prefill_len:
                self._sample(index, row, output)
        for index in sorted(self.decode_set):
            self._decode(index, self.rows[index], output)
        return output

    def _apply(self, step: SchedulerOutput) -> None:
        for index in step.finished_rows:
            del self.rows[index]
            self.decode_set.discard(index)
        for new in step.new_reqs:
            assert new.row not in self.rows
            self.rows[new.row] = _row_of(new, len(self.memory.groups))
        for table, block_ids in step.new_block_ids:
            index, group = divmod(table, len(self.memory.groups))
            self.rows[index].block_ids[group].extend(block_ids)
        for index in step.decode_add:
            assert index in self.rows
            assert index not in self.decode_set
            self.decode_set.add(index)
        for index in step.decode_remove:
            self.decode_set.remove(index)
        sources = {source for source, _ in step.block_copies}
        self.num_copies += len(step.block_copies)
        for source, target in step.block_copies:
            assert target not in sources
            self.memory.slots[target] = list(self.memory.slots[source])

    def _compute(self, row: WorkerRow, count: int) -> None:
        self._write(row, _kv_of(row)[: row.num_computed + count])
        row.num_computed += count

    def _write(self, row: WorkerRow, states: list[int]) -> None:
        """Writes KV from `num_computed` on. Raises IndexError where the row has no blocks."""
        if not row.is_garbage:
            self.memory.check(row.block_ids, states, row.num_computed, row.num_computed)
        for position in range(row.num_computed, len(states)):
            self.memory.write(row.block_ids, position, states[position])

    def _decode(self, index: int, row: WorkerRow, output: ModelRunnerOutput) -> None:
        """Gives one token more than drafts are right. A row that has all its tokens stays
        as it is.
        """
        num_known = len(row.tokens)
        assert row.num_computed == num_known - 1 >= row.prefill_len - 1
        if num_known == row.max_len:
            assert self.query_len > 1, "one token a step has a known end"
            self._report(index, row, [0], output)
            return
        drafts = self._drafts(row)
        states = _kv_of(row, drafts)
        self._write(row, states)
        found: list[int] = []
        for place in range(self.query_len):
            num_output = num_known + place - row.prompt_len
            state = states[num_known + place - 1]
            found.append(next_token(state, num_output, row.sampling, row.eos_token_ids))
            if place < len(drafts) and drafts[place] != found[place]:
                break
        row.tokens += found[: row.max_len - num_known]
        row.num_computed = len(row.tokens) - 1
        self._report(index, row, found, output)

    def _drafts(self, row: WorkerRow) -> list[int]:
        """Returns drafts; what cannot be computed, and what is missing, becomes token 0."""
        count = self.query_len - 1
        if self.drafter is None or count == 0:
            return [0] * count
        drafts = self.drafter(_continuation(row, count))[:count]
        drafts = [token if 0 <= token < VOCAB_SIZE else 0 for token in drafts]
        return drafts + [0] * (count - len(drafts))

    def _look_up(self, index: int, row: WorkerRow, count: int, output: ModelRunnerOutput) -> None:
        """Ranks of the prompt's tokens among those that `count` tokens just computed predict."""
        if row.sampling.prompt_logprobs is None:
            return
        first = row.num_computed - count + 1
        ranks = prompt_ranks(row.tokens[: row.prompt_len])[first - 1 : row.num_computed]
        if ranks:
            part = PromptLogprobs(first, 0, b"", b"", array("i", ranks).tobytes())
            output.prompt_logprobs.append(RowPromptLogprobs(index, row.epoch, part))

    def _sample(self, index: int, row: WorkerRow, output: ModelRunnerOutput) -> None:
        state = _kv_of(row)[row.num_computed - 1]
        num_output = len(row.tokens) - row.prompt_len
        token = next_token(state, num_output, row.sampling, row.eos_token_ids)
        row.tokens.append(token)
        self._report(index, row, [token], output)
        if row.sibling_seeds:
            samplings = [
                msgspec.structs.replace(row.sampling, seed=seed) for seed in row.sibling_seeds
            ]
            drawn = [next_token(state, num_output, s, row.eos_token_ids) for s in samplings]
            output.siblings.append(RowSiblings(index, row.epoch, SiblingTokens(drawn)))

    def _report(
        self, index: int, row: WorkerRow, tokens: list[int], output: ModelRunnerOutput
    ) -> None:
        output.rows.append(index)
        output.epochs.append(row.epoch)
        output.token_ids += tokens
        if self.query_len > 1:
            output.counts.append(len(tokens))


def _kv_of(row: WorkerRow, drafts: Sequence[int] = ()) -> list[int]:
    """Returns the KV of the row's tokens and of drafts behind them."""
    states = _right_kv_of(row)
    states = states + kv_of(drafts, states)
    return [hash((state, True)) for state in states] if row.is_garbage else states


def _right_kv_of(row: WorkerRow) -> list[int]:
    row.states += kv_of(row.tokens[len(row.states) :], row.states)
    return row.states


def _continuation(row: WorkerRow, count: int) -> list[int]:
    """Returns the next tokens of the row."""
    tokens = list(row.tokens)
    state = _right_kv_of(row)[-1]
    for _ in range(count):
        num_output = len(tokens) - row.prompt_len
        tokens.append(next_token(state, num_output, row.sampling, row.eos_token_ids))
        state = hash((state, tokens[-1]))
    return tokens[len(row.tokens) :]


def _row_of(new: NewRequestData, num_groups: int) -> WorkerRow:
    tokens = np.frombuffer(new.prefill_token_ids, "<i4").tolist()
    assert new.num_computed_tokens < len(tokens)
    assert new.prompt_len <= len(tokens)
    return WorkerRow(
        epoch=new.epoch,
        prompt_len=new.prompt_len,
        prefill_len=len(tokens),
        tokens=tokens,
        num_computed=new.num_computed_tokens,
        block_ids=(list(new.block_ids), *([] for _ in range(num_groups - 1))),
        max_len=new.max_len,
        sampling=new.sampling,
        eos_token_ids=new.eos_token_ids,
        sibling_seeds=new.sibling_seeds,
    )

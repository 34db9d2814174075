"""Random lives of rows under grammars: every mask is that of a fresh matcher which was given the
row's output, and in the end nobody holds a matcher.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import llguidance
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch.places import Places
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import NewRequestData
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.tokenizer import load_grammar_tokenizer, parser_limits
from engine.sample.grammars import GrammarStates
from tests.engine.worker.grammar_requests import (
    DEAD_END,
    EOS,
    GRAMMARS,
    VOCAB,
    model_in,
)

ROWS = 4
CPU = torch.device("cpu")
NO_SUCH_TOKENS = (-1, 2**31 - 1)
KINDS = [*GRAMMARS, DEAD_END, "start: nowhere", ""]


@dataclass
class Owner:
    """A request in a row, as the test knows it."""

    grammar: str
    epoch: int
    min_tokens: int
    output: list[int] = field(default_factory=list)

    def allowed(self, tokenizer: llguidance.LLTokenizer, drafts: list[int]) -> set[int] | None:
        """Returns the tokens that may follow output and drafts; None: all, or it does not matter,
        because the output has ended before."""
        tokens = [*self.output, *drafts]
        if not self.grammar or set(tokens) & {*EOS, *NO_SUCH_TOKENS}:
            return None
        matcher = llguidance.LLMatcher(tokenizer, self.grammar, limits=parser_limits(), log_level=0)
        if matcher.is_error():
            return set()
        if not matcher.consume_tokens(tokens):
            return None
        words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            return set()
        found = set(np.flatnonzero(np.unpackbits(words, bitorder="little")).tolist())
        if len(tokens) < self.min_tokens and found - set(EOS):
            return found - set(EOS)
        return found


class Result:
    """The tokens of a step, as the next one reads them."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, int, list[int]]] = []

    def wait_for_tokens(self) -> list[tuple[int, int, list[int]]]:
        return self.tokens


class Rows:
    """Plays the runner over `GrammarStates`."""

    def __init__(self, states: GrammarStates, tokenizer: llguidance.LLTokenizer, seed: int) -> None:
        self.states, self.tokenizer = states, tokenizer
        self.rng = random.Random(seed)
        self.owners: dict[int, Owner] = {}
        self.left: list[Owner] = []
        """Requests that left, which may come back."""
        self.epochs = [0] * ROWS

    def add(self, row: int, kind: int, min_tokens: int) -> None:
        """A new request enters a row, or one that left comes back with its output."""
        if row in self.owners:
            self.remove(row)
        self.epochs[row] += 1
        owner = Owner(KINDS[kind], self.epochs[row], min_tokens)
        if self.left and self.rng.random() < 0.5:
            owner = self.left.pop()
            owner.epoch = self.epochs[row]
        self.owners[row] = owner
        tokens = np.array([9, 8, *owner.output], "<i4")
        sampling = SamplingParams(grammar=owner.grammar, min_tokens=owner.min_tokens)
        new = NewRequestData(
            row, owner.epoch, 2, tokens.tobytes(), 0, [], 99, sampling, eos_token_ids=EOS
        )
        self.states.add_request(new, tokens[2:])

    def remove(self, row: int) -> None:
        owner = self.owners.pop(row)
        self.left.append(owner)
        self.states.remove_request(row)

    def step(self, rows: list[int], width: int) -> None:
        """All of `rows` choose tokens; drafts are those of the row's own future, or wrong ones."""
        drafts = [self._drafts(self.owners[row], width - 1) for row in rows]
        batch = [[0, *of_row] for of_row in drafts]
        index = np.repeat(np.array(rows, np.int32), width)
        mapping = torch.from_numpy(index)
        input_ids = torch.tensor(batch, dtype=torch.int32).flatten()
        places = Places(len(rows), width, index, index, mapping, mapping, input_ids, width == 1)
        if not self.states.needed_by(index):
            assert not any(self.owners[row].grammar for row in rows)
            return
        logits = torch.zeros(len(index), VOCAB)
        failures = self.states.apply(logits, places)
        result = Result()
        for i, row in enumerate(rows):
            failure = failures.get(i)
            tokens = self._check(
                self.owners[row],
                drafts[i],
                logits[i * width : (i + 1) * width],
                width if failure is None else failure.place,
            )
            assert failure is None or failure.reason
            result.tokens.append((row, self.owners[row].epoch, tokens))
        self.states.step_started(result)

    def _drafts(self, owner: Owner, count: int) -> list[int]:
        drafts: list[int] = []
        for _ in range(count):
            allowed = owner.allowed(self.tokenizer, drafts)
            is_wrong = self.rng.random() < 0.2 or not allowed
            wrong = self.rng.choice([*NO_SUCH_TOKENS, 77, EOS[0]])
            drafts.append(wrong if is_wrong else self.rng.choice(sorted(allowed or ())))
        return drafts

    def _check(
        self, owner: Owner, drafts: list[int], logits: torch.Tensor, failed_at: int
    ) -> list[int]:
        """Checks the masks of a row's places, and returns the tokens that it gets."""
        tokens: list[int] = []
        for place in range(len(logits)):
            allowed = owner.allowed(self.tokenizer, drafts[:place])
            if allowed is not None:
                assert (place == failed_at) == (not allowed)
                if not allowed:
                    break
                found = set(torch.nonzero(logits[place] == 0).flatten().tolist())
                assert found == allowed
            chosen = self.rng.choice(sorted(allowed)) if allowed else 5
            if place < len(drafts) and self.rng.random() < 0.7:
                chosen = drafts[place] if allowed and drafts[place] in allowed else chosen
            tokens.append(chosen)
            if place < len(drafts) and drafts[place] != chosen:
                break
        owner.output += tokens
        return tokens


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    folder = tmp_path_factory.mktemp("tokenizer")
    return GrammarCompiler(model_in(folder), num_threads=2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> llguidance.LLTokenizer:
    return load_grammar_tokenizer(model_in(tmp_path_factory.mktemp("tokenizer")))


ACTIONS = st.one_of(
    st.tuples(
        st.just("add"),
        st.integers(0, ROWS - 1),
        st.integers(0, len(KINDS) - 1),
        st.sampled_from([0, 0, 6]),
    ),
    st.tuples(st.just("remove"), st.integers(0, ROWS - 1)),
    st.tuples(st.just("step"), st.sets(st.integers(0, ROWS - 1), min_size=1)),
    st.tuples(st.just("step"), st.just(set(range(ROWS)))),
)


@settings(max_examples=60, deadline=None)
@given(
    actions=st.lists(ACTIONS, min_size=5, max_size=30),
    width=st.sampled_from([1, 1, 3]),
    seed=st.integers(0, 2**32),
)
def test_every_mask_is_that_of_a_fresh_matcher(
    compiler: GrammarCompiler,
    tokenizer: llguidance.LLTokenizer,
    actions: list[tuple],
    width: int,
    seed: int,
) -> None:
    states = GrammarStates(ROWS, VOCAB, CPU, compiler, num_threads=2, query_len=width)
    rows = Rows(states, tokenizer, seed)
    for name, *arguments in actions:
        if name == "add":
            rows.add(*arguments)
        elif name == "remove" and arguments[0] in rows.owners:
            rows.remove(arguments[0])
        elif name == "step":
            chosen = sorted(rows.owners.keys() & arguments[0])
            if chosen:
                rows.step(chosen, width)
    assert states.num_held == sum(bool(owner.grammar) for owner in rows.owners.values())
    for row in list(rows.owners):
        rows.remove(row)
    assert states.num_held == 0
    assert not states.needed_by(np.arange(ROWS, dtype=np.int32))

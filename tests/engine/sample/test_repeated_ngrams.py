"""No sequence of n tokens comes twice in an output, in every place, whatever else is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch.places import Places
from engine.contracts.sampling_params import SamplingParams
from engine.sample import repeated_ngrams
from engine.sample.repeated_ngrams import RepeatedNgramStates
from tandem_kernels import ops

VOCAB, ROWS, LENGTH = 5, 4, 48


def forbidden_after(size: int, output: list[int]) -> set[int]:
    """Returns by definition the tokens with which a sequence of `size` would come again."""
    there = {tuple(output[i : i + size]) for i in range(len(output) - size + 1)}
    latest = output[max(0, len(output) - size + 1) :]
    found = {token for token in range(VOCAB) if size and (*latest, token) in there}
    return found if len(found) < VOCAB else set()


def places_of(rows: list[int], lengths: list[int], slack: int) -> Places:
    """Returns places of which the host knows the lengths but for `slack`."""
    return Places(
        num_decodes=len(rows),
        decode_query_len=1,
        rows=np.array(rows, np.int32),
        max_seq_lens=np.array(lengths, np.int32) + np.int32(slack),
        idx_mapping=torch.tensor(rows, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        input_ids=torch.zeros(len(rows), dtype=torch.int32),
        has_exact_lens=slack == 0,
    )


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)
OUTPUTS = st.lists(st.integers(0, VOCAB - 1), max_size=30)
REQUESTS = st.lists(
    st.tuples(TOKENS, OUTPUTS, st.integers(0, 4)), min_size=1, max_size=ROWS
)  # fmt: skip


@given(
    requests=REQUESTS,
    slack=st.integers(0, 3),
    at_once=st.sampled_from([1, 7, 256]),
    together=st.sampled_from([1, 40, 4096]),
)
@settings(deadline=None)
def test_every_place_forbids_what_would_repeat(
    requests: list[tuple[list[int], list[int], int]], slack: int, at_once: int, together: int
) -> None:
    """Asks for all places of an output at once, as steps with drafts do, and however few tokens
    are compared, or places looked at, at a time."""
    table = torch.zeros((ROWS, LENGTH), dtype=torch.int32)
    states = RepeatedNgramStates(ROWS, table)
    rows, lengths, expected = [], [], []
    for row, (prompt, output, size) in enumerate(requests):
        table[row, : len(prompt) + len(output)] = torch.tensor([*prompt, *output])
        states.add_request(row, SamplingParams(no_repeat_ngram_size=size), len(prompt))
        for known in range(len(output) + 1):
            rows.append(row)
            lengths.append(len(prompt) + known)
            expected.append(forbidden_after(size, output[:known]))
    places = places_of(rows, lengths, slack)
    assert states.needed_by(places.rows) == any(size for *_, size in requests)
    logits = torch.arange(float(VOCAB)).repeat(len(rows), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeated_ngrams, "_MOST_COMPARED", 0)
        patch.setattr(repeated_ngrams, "_FEWEST_CANDIDATES", at_once)
        patch.setattr(repeated_ngrams, "_MOST_CANDIDATES", together)
        states.apply(logits, places)
    found = [set(torch.nonzero(row == -torch.inf).flatten().tolist()) for row in logits]
    assert found == expected
    plain = torch.arange(float(VOCAB)).expand_as(logits)
    assert torch.equal(logits[logits != -torch.inf], plain[logits != -torch.inf])
    for row in range(len(requests)):
        states.remove_request(row)
    assert not states.needed_by(places.rows)


def test_a_long_output_beside_many_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are made as long as the longest of those that are looked at together."""
    rows, length, most = 256, 20_000, 1 << 22
    table = torch.zeros((rows, length), dtype=torch.int32)
    states = RepeatedNgramStates(rows, table)
    for row in range(rows):
        states.add_request(row, SamplingParams(no_repeat_ngram_size=2), 0)
    looked_at: list[int] = []
    add_sparse = ops.add_sparse

    def note(logits: torch.Tensor, *entries: torch.Tensor) -> None:
        looked_at.append(len(entries[0]))
        add_sparse(logits, *entries)

    monkeypatch.setattr(ops, "add_sparse", note)
    logits = torch.zeros((rows, VOCAB))
    states.apply(logits, places_of(list(range(rows)), [*[9] * (rows - 1), length], slack=0))
    assert max(looked_at) <= most
    assert torch.equal(logits == -torch.inf, (torch.arange(VOCAB) == 0).expand(rows, VOCAB))


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_was_said_is_not_said_again(bench: Any, temperature: float, size: int) -> None:
    """This holds beside rows that may repeat themselves, and for one that comes back after a
    preemption."""
    sampling = SamplingParams(temperature=temperature, seed=4, no_repeat_ngram_size=size)
    free = SamplingParams(temperature=temperature, seed=4)
    logits = torch.full((bench.vocab_size,), -torch.inf)
    logits[[3, 7, 8, 9]] = torch.tensor([3.0, 2.0, 1.5, 1.0])
    bench.add(0, [3, 3, 3], sampling)
    bench.add(1, [3, 3, 3], free)
    said, unlimited = [], []
    count = min(16, 4**size) // 2
    for _ in range(count):
        step = bench.step({0: logits, 1: logits})
        said.append(step[0])
        unlimited.append(step[1])
    bench.remove(0)
    bench.add(2, [3, 3, 3], sampling, output=said)
    said += bench.run(2, logits, count - size + 1)

    def ngrams(tokens: list[int], size: int) -> list[tuple[int, ...]]:
        return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]

    # Where all four ways on were taken before, any is right, so the last few do not count.
    if size == 1:
        assert len(set(said)) == len(said)
    assert len(set(unlimited)) < len(unlimited) or size == 1
    for number, ngram in enumerate(ngrams(said, size)):
        before = ngrams(said, size)[:number]
        if ngram in before:
            ways = {(*ngram[:-1], token) for token in (3, 7, 8, 9)}
            assert ways <= set(before), (said, ngram)


def test_a_row_with_nothing_else_left_says_it_again(bench: Any) -> None:
    sampling = SamplingParams(temperature=0.0, no_repeat_ngram_size=2, allowed_token_ids=(5,))
    bench.add(0, [1], sampling)
    assert bench.run(0, torch.zeros(bench.vocab_size), 4) == [5, 5, 5, 5]

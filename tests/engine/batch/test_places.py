"""Places of a step: which drafts count before each, and which tokens are kept."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.batch.place_tables import places_of

tokens = st.integers(0, 2)


@st.composite
def chosen_and_computed(
    draw: st.DrawFn,
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Returns (what decodes computed, what was chosen there, what was chosen for others)."""
    width, num_decodes = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    line = st.lists(tokens, min_size=width, max_size=width)
    lines = st.lists(line, min_size=num_decodes, max_size=num_decodes)
    others = draw(st.lists(tokens, min_size=0 if num_decodes else 1, max_size=2))
    return draw(lines), draw(lines), others


@settings(max_examples=200, deadline=None)
@given(case=chosen_and_computed())
def test_drafts_are_kept_as_far_as_they_were_chosen(
    case: tuple[list[list[int]], list[list[int]], list[int]],
) -> None:
    computed, chosen, others = case
    expected = []
    for inputs, found in zip(computed, chosen, strict=True):
        kept = [found[0]]
        for draft, at_draft in zip(inputs[1:], found[1:], strict=True):
            if draft != kept[-1]:
                break
            kept.append(at_draft)
        expected.append(kept)
    expected += [[token] for token in others]
    places = places_of(
        [(i, line) for i, line in enumerate(computed)], list(range(10, 10 + len(others)))
    )
    flat = torch.tensor([token for line in chosen for token in line] + others)
    accepted = places.accept(flat)
    assert accepted.shape == (len(expected), places.decode_query_len)
    assert [[t for t in line if t >= 0] for line in accepted.tolist()] == expected
    # Each token is where `cells` says.
    cells = places.cells().tolist()
    table = accepted.flatten().tolist()
    assert all(table[cell] in (token, -1) for cell, token in zip(cells, flat.tolist(), strict=True))
    assert len(set(cells)) == len(flat)


def test_drafts_before_a_place_count_as_output() -> None:
    places = places_of([(4, [7, 1, 2, 3]), (5, [8, 4, 5, 6])], [6])
    assert places.drafts_before().tolist() == [
        [-1, -1, -1],
        [1, -1, -1],
        [1, 2, -1],
        [1, 2, 3],
        [-1, -1, -1],
        [4, -1, -1],
        [4, 5, -1],
        [4, 5, 6],
        [-1, -1, -1],
    ]
    assert places_of([(4, [7])], [6]).drafts_before().shape == (2, 0)

"""The guess about cached prefixes against a plain model that remembers everything."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.disagg.cached_prefixes import CachedPrefixes, CachedStates
from engine.contracts.request_spec import RequestSpec

BLOCK = 4
SPEC = RequestSpec()
TOKENS = st.lists(st.integers(0, 2), max_size=20)
SALTS = st.sampled_from(["", "tenant"])


def common_prefix(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@given(past=st.lists(st.tuples(TOKENS, SALTS), max_size=8), prompt=TOKENS, salt=SALTS)
@settings(max_examples=300, deadline=None)
def test_it_finds_the_longest_common_prefix_in_full_blocks(
    past: list[tuple[list[int], str]], prompt: list[int], salt: str
) -> None:
    index = CachedPrefixes(1000, BLOCK)
    for tokens, their_salt in past:
        index.add(tokens, RequestSpec(cache_salt=their_salt))
    longest = max((common_prefix(t, prompt) for t, s in past if s == salt), default=0)
    expected = min(longest // BLOCK * BLOCK, len(prompt) - 1)
    assert index.num_cached_tokens(prompt, RequestSpec(cache_salt=salt)) == [expected]


def test_the_oldest_blocks_are_forgotten() -> None:
    index = CachedPrefixes(4, BLOCK)
    first, second = list(range(8)), list(range(100, 108))
    index.add(first, SPEC)
    index.add(second, SPEC)
    assert index.num_cached_tokens([*first, 1], SPEC) == [8]
    index.add(list(range(200, 208)), SPEC)
    assert len(index) == 4
    assert index.num_cached_tokens([*first, 1], SPEC) == [0]
    assert index.num_cached_tokens([*second, 1], SPEC) == [8]


def test_without_a_cache_nothing_is_remembered() -> None:
    index = CachedPrefixes(0, BLOCK)
    index.add(list(range(8)), SPEC)
    assert (len(index), index.num_cached_tokens(list(range(8)), SPEC)) == (0, [0])


def test_a_reset_forgets_all() -> None:
    index = CachedPrefixes(100, BLOCK)
    index.add(list(range(8)), SPEC)
    index.clear()
    assert (len(index), index.num_cached_tokens(list(range(9)), SPEC)) == (0, [0])


def test_each_group_is_remembered_by_itself() -> None:
    index = CachedPrefixes(3, BLOCK, num_groups=3)
    prompt = list(range(13))
    index.add(prompt[:8], SPEC, group=2)
    index.add(prompt, SPEC, group=0)
    assert index.num_cached_tokens([*prompt, 1], SPEC) == [12, 0, 8]
    assert index.num_cached_tokens([*prompt[:7], 60, 61], SPEC) == [4, 0, 4]
    index.add(list(range(20, 32)), SPEC, group=0)
    assert index.num_cached_tokens(prompt, SPEC) == [0, 0, 8]
    index.clear()
    assert index.num_cached_tokens(prompt, SPEC) == [0, 0, 0]


def test_states_are_where_the_engine_keeps_them() -> None:
    """It keeps them behind the last full block of an answer, and of a prompt computed here."""
    prompt, answer = list(range(9)), list(range(20, 30))
    spec = RequestSpec(prompt)
    turn = [*prompt, *answer, 50, 51, 52]
    for is_local, of_prompt in ((True, 8), (False, 0)):
        index = CachedStates(10, BLOCK, num_groups=2)
        index.add([*prompt, *answer], spec, group=1, is_local=is_local)
        assert index.num_cached_tokens(turn, spec) == [0, 16]
        assert index.num_cached_tokens(turn[:14], spec) == [0, of_prompt], "not at each block"
        assert index.num_cached_tokens(turn, RequestSpec(prompt, cache_salt="other")) == [0, 0]
    for several in (RequestSpec(prompt, sibling_seeds=(7,)), spec):
        index = CachedStates(10, BLOCK, drafts=several is spec)
        index.add([*prompt, *answer], several)
        assert index.num_cached_tokens(turn, spec) == [8], "choices and drafts keep the prompt's"
    index = CachedStates(10, BLOCK)
    index.add([*prompt, *answer[:3]], spec, is_local=False)
    assert len(index) == 0, "the state behind 12 tokens is kept with the step behind it"

"""One table says what a step launches, and how much of a prompt is a graph beside answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contracts.steps.step_launches import GraphKey, LaunchTime, StepLaunches, StepParts
from engine.models.recorded_steps import drafted_keys, prompt_keys

RECORDED = StepLaunches({1: (1, 2, 8)}, tuple(prompt_keys(100, 600)))
ANY_CONTEXT = replace(RECORDED, prompts=tuple(prompt_keys(100, 600, any_context=True)))


def test_decodes_take_the_smallest_batch_that_holds_them() -> None:
    assert RECORDED.find(StepParts(3)) == GraphKey.of_decodes(8, 1, True)
    assert RECORDED.find(StepParts(9)) == "9 decodes, recorded up to 8"
    assert "2 tokens" in str(RECORDED.find(StepParts(1, query_len=2)))
    assert RECORDED.of_drafts(3, 1) is None
    assert RECORDED.of_drafts(3, 0) == GraphKey.of_drafts(8, 0)


def test_decodes_beside_prompts_have_a_longest_context() -> None:
    near = StepParts(1, 1, 16, longest_decode=4096)
    assert RECORDED.find(near) == GraphKey(8, 32, True)
    far = near._replace(longest_decode=4097)
    assert "a decode behind 4097 tokens beside prompts" in str(RECORDED.find(far))
    assert RECORDED.beside(far, 64) == 0
    assert isinstance(RECORDED.find(far._replace(num_decodes=0)), GraphKey)
    assert isinstance(RECORDED.find(StepParts(1, longest_decode=9000)), GraphKey)


def test_graphs_of_many_requests_hold_decodes_of_any_context() -> None:
    """Few short prompts alone are spared the launches of such decodes."""
    far = StepParts(1, 1, 16, longest_decode=100_000)
    assert ANY_CONTEXT.find(far) == GraphKey(64, 128, True, any_context=True)
    assert ANY_CONTEXT.find(far._replace(longest_decode=4096)) == GraphKey(8, 32, True)
    assert ANY_CONTEXT.find(far._replace(num_decodes=0)) == GraphKey(8, 16, True)
    alone = StepParts(1, longest_decode=100_000)
    assert ANY_CONTEXT.beside(alone, 16) == 127 and RECORDED.beside(alone, 16) == 0
    assert len(ANY_CONTEXT.keys) == len(RECORDED.keys)
    assert ANY_CONTEXT.find(far._replace(prompt_tokens=512)) == (
        "513 tokens with prompts, recorded up to 512"
    )


def test_decodes_with_drafts_beside_prompts_have_graphs_of_their_own() -> None:
    """Whatever their contexts: without a graph they are attended like prompts, too."""
    drafted = tuple(drafted_keys(100, 600, 4))
    launches = replace(ANY_CONTEXT, prompts=(*ANY_CONTEXT.prompts, *drafted))
    step = StepParts(10, 1, 60, query_len=3, longest_decode=100_000)
    key = launches.find(step)
    assert key == GraphKey(64, 128, True, draft_width=4) and isinstance(key, GraphKey)
    assert (key.width, key.decodes) == (4, False)
    assert launches.find(step._replace(prompt_tokens=483)) == (
        "513 tokens with prompts, recorded up to 512"
    )
    assert launches.beside(StepParts(10, query_len=3), 100) == 226
    assert "decodes of 5 tokens" in str(launches.find(step._replace(query_len=5)))
    assert launches.find(StepParts(0, 1, 60, query_len=3)) == GraphKey(8, 64, True)
    assert [len(drafted_keys(100, 2000, width)) for width in (1, 4, 8)] == [0, 8, 8]
    assert {key.num_reqs for key in drafted_keys(100, 2000, 16)} == {32}
    assert [key.num_reqs for key in drafted_keys(256, 2000, 4)] == 4 * [64] + 4 * [128]


def test_beside_decodes_steps_may_have_to_be_smaller() -> None:
    launches = replace(ANY_CONTEXT, most_beside=256)
    assert launches.find(StepParts(1, 1, 256)) == "257 tokens with prompts, recorded up to 256"
    assert launches.find(StepParts(0, 1, 257)) == GraphKey(8, 320, True)
    assert launches.beside(StepParts(6), 2000) == 250


def test_where_nothing_is_recorded_the_reason_is_told() -> None:
    launches = StepLaunches(none="enforce_eager")
    assert launches.find(StepParts(1)) == launches.find(StepParts(0, 1, 5)) == "enforce_eager"
    assert launches.beside(StepParts(1), 64) == 0 and launches.of_decodes(1, 1, True) is None


def test_steps_that_are_cut_fill_the_graph_of_their_prompts() -> None:
    """No graph holds both. The GPU computes 500 tokens for longer than half of the time
    in which the host launches the step."""
    launches = StepLaunches(
        {4: (1, 2, 16)}, tuple(prompt_keys(64, 600)), one_by_one=LaunchTime(tokens=1000)
    )
    decodes = StepParts(10, query_len=4)
    found = [launches.beside(decodes, tokens) for tokens in (64, 100, 129, 330, 448, 2000)]
    assert found == [64, 128, 192, 384, 384, 384]
    assert launches.beside(decodes._replace(num_decodes=17), 100) == 0, "decodes are no graph"
    assert launches.beside(decodes._replace(query_len=3), 100) == 0
    assert replace(launches, one_by_one=LaunchTime()).beside(decodes, 100) == 0


@pytest.mark.parametrize("pair", [0.0, 1e-3, 4e-3])
def test_a_graph_that_prompts_fill_is_one_for_which_their_step_is_cut(pair: float) -> None:
    """Workers cut by the work of prompts, of which attention to their own tokens is a part."""
    one_by_one = LaunchTime(tokens=1000, pair=pair)
    launches = StepLaunches({4: (16,)}, tuple(prompt_keys(64, 600)), one_by_one=one_by_one)
    most = launches.beside(StepParts(10, query_len=4), 2000)
    sizes = sorted({key.num_tokens for key in launches.prompts})
    larger = sizes[sizes.index(most) + 1]
    assert launches.is_cut(one_by_one.work(0, most))
    assert not launches.is_cut(one_by_one.work(0, larger))


def test_launching_one_by_one_outlasts_little_work() -> None:
    one_by_one = LaunchTime(tokens=1000, seconds=0.02, pair=0.001)
    assert one_by_one.work(0, 200) == 220 and one_by_one.work(4000, 200) == 1020
    assert one_by_one.outlasts(999) and not one_by_one.outlasts(1000)
    assert one_by_one.outlasts(700, wait_s=0.005) and not one_by_one.outlasts(700, wait_s=0.007)
    assert one_by_one._replace(seconds=0.0).outlasts(700, wait_s=9.0), "how long is not known"
    assert not StepLaunches().one_by_one.outlasts(1)


@given(decodes=st.integers(1, 110), tokens=st.integers(1, 2000), samples=st.booleans())
def test_what_fits_beside_decodes_is_a_graph_and_fills_it(
    decodes: int, tokens: int, samples: bool
) -> None:
    beside = RECORDED.beside(StepParts(decodes), tokens)
    if decodes >= RECORDED.most_requests:
        assert beside == 0
        return
    step = StepParts(decodes, 1, beside, samples=samples)
    key = RECORDED.find(step)
    assert isinstance(key, GraphKey) and key.num_tokens == step.num_tokens
    assert beside >= tokens or key.num_tokens == RECORDED.most_prompt_tokens
    fewer = RECORDED.find(step._replace(prompt_tokens=min(tokens, beside)))
    assert isinstance(fewer, GraphKey) and fewer.num_tokens == key.num_tokens

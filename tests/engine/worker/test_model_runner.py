"""The model runner, driven by step messages written by hand."""

from __future__ import annotations

import math

import pytest
import torch

from engine.batch.row_states import RowError
from engine.contracts.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.contracts.scheduler_output import SchedulerOutput
from engine.sample import prompt_logprobs
from engine.worker.kv_connector import KVConnector
from kv_transfer.metadata import KVConnectorMetadata
from tests.engine.worker.saved_layers import SavedLayers

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(seed=5, temperature=0.9, top_p=0.95)
PENALISED = SamplingParams(
    seed=6, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, min_tokens=8
)
KINDS = [GREEDY, SEEDED, PENALISED]
MAX_LEN = 96


def generate(driver, prompt, steps, sampling=GREEDY, row=0, name="alone"):
    """Runs a request by itself; returns its output tokens."""
    driver.add(name, row, prompt, sampling, eos=(7,))
    driver.step({name: len(prompt)})
    driver.run(steps - 1)
    driver.remove(name)
    return driver.tokens[name][len(prompt) :]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 33])
def test_every_token_follows_from_all_before_it(driver, make_prompt, length) -> None:
    """The cache holds what a prompt of prompt and output would compute."""
    prompt = make_prompt(length, 1)
    output = generate(driver, prompt, 12)
    again = [generate(driver, prompt + output[:i], 1)[0] for i in range(12)]
    assert output == again
    assert len(set(output)) > 4


@pytest.mark.parametrize("chunks", [[1] * 30, [29, 1], [1, 29], [8, 8, 8, 6], [13, 17]])
@pytest.mark.parametrize("sampling", KINDS)
def test_chunked_prompts_give_the_same_tokens(driver, make_prompt, chunks, sampling) -> None:
    prompt = make_prompt(30, 2)
    whole = generate(driver, prompt, 6, sampling)
    driver.add("chunked", 3, prompt, sampling, eos=(7,))
    for chunk in chunks[:-1]:
        assert driver.step({"chunked": chunk}) == {}
        assert driver.last.token_ids == []
    assert set(driver.step({"chunked": chunks[-1]})) == {"chunked"}
    driver.run(5)
    assert driver.tokens["chunked"][30:] == whole


@pytest.mark.parametrize("chunks", [[40], [1] * 40, [17, 1, 21, 1], [39, 1]])
def test_prompt_logprobs_are_those_of_the_same_output(
    driver, make_prompt, make_scores, chunks, monkeypatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "_MOST_TOKENS", 18)
    generated, scored = make_scores(driver, make_prompt(30, 2), chunks)
    for output, prompt in zip(generated, scored, strict=True):
        assert (output.token_ids, output.rank) == (prompt.token_ids, prompt.rank)
        assert output.logprobs == pytest.approx(prompt.logprobs, abs=1e-4)


def test_mixed_batches_equal_requests_alone(driver, make_prompt) -> None:
    """Prompts, chunks and decodes of three kinds of sampling in the same steps, rows unordered."""
    lengths = {"a": 5, "b": 40, "c": 8, "d": 1, "e": 23}
    prompts = {name: make_prompt(length, length) for name, length in lengths.items()}
    kinds = {name: KINDS[i % 3] for i, name in enumerate(prompts)}
    alone = {name: generate(driver, prompts[name], 10, kinds[name]) for name in prompts}

    for row, name in zip([4, 1, 5, 2], "abcd", strict=True):
        driver.add(name, row, prompts[name], kinds[name], eos=(7,))
    driver.step({"a": 5})
    driver.step({"b": 17})
    driver.step({"c": 3, "b": 1})
    driver.add("e", 0, prompts["e"], kinds["e"], eos=(7,))
    driver.step({"e": 10, "c": 5, "b": 21})
    driver.step({"b": 1, "e": 13})
    driver.run(9)
    for name, prompt in prompts.items():
        output = driver.tokens[name][len(prompt) :]
        assert len(output) >= 10
        assert output[:10] == alone[name], name


@pytest.mark.parametrize("sampling", KINDS)
def test_preempted_and_resumed_goes_on_with_the_same_tokens(driver, make_prompt, sampling) -> None:
    prompt = make_prompt(11, 3)
    whole = generate(driver, prompt, 14, sampling)
    driver.add("other", 0, make_prompt(9, 4))
    driver.add("victim", 1, prompt, sampling, eos=(7,))
    driver.step({"victim": 11, "other": 9})
    driver.run(4)
    driver.remove("victim")
    driver.run(2)
    known = driver.tokens["victim"]
    driver.add("back", 5, known, sampling, prompt_len=11, eos=(7,))
    driver.step({"back": 7})
    driver.step({"back": len(known) - 7})
    driver.run(14 - (len(known) - 11) - 1)
    assert driver.tokens["back"][11:] == whole


def test_a_row_changes_hands_within_one_message(driver, make_prompt) -> None:
    first, second = make_prompt(20, 5), make_prompt(6, 6)
    alone = generate(driver, second, 5, GREEDY, row=3)
    driver.add("first", 2, first, PENALISED)
    driver.step({"first": 20})
    driver.run(3)
    first_epoch = driver.last.epochs
    driver.remove("first")
    driver.add("second", 2, second)
    driver.step({"second": 6})
    assert (driver.last.rows, driver.last.epochs) == ([2], [first_epoch[0] + 1])
    driver.run(4)
    assert driver.tokens["second"][6:] == alone


def test_a_result_names_the_owner_of_its_step(runner, make_driver, make_prompt) -> None:
    """Read late, after the row was given away, it still carries the old epoch."""
    results = []

    def execute(step):
        results.append(runner.execute_model(step))
        return results[-1].get_output()

    driver = make_driver(execute)
    driver.add("first", 2, make_prompt(4, 1))
    driver.step({"first": 4})
    driver.remove("first")
    driver.add("second", 2, make_prompt(4, 2))
    driver.step({"second": 4})
    assert [result.get_output().epochs for result in results] == [[1], [2]]


def test_a_cached_prefix_needs_no_computing(driver, make_prompt) -> None:
    """Two blocks that another request filled, then other tokens."""
    prefix, tail = make_prompt(16, 7), make_prompt(13, 8)
    alone = generate(driver, prefix + tail, 8)
    driver.add("owner", 0, prefix + make_prompt(5, 9))
    driver.step({"owner": 21})
    shared = driver.blocks["owner"][:2]
    driver.add("sharer", 1, prefix + tail, computed=16, blocks=shared)
    assert set(driver.step({"sharer": 13})) == {"owner", "sharer"}
    driver.run(7)
    assert driver.tokens["sharer"][29:] == alone


@pytest.mark.parametrize("as_chunk", [True, False])
@pytest.mark.parametrize("length", [15, 16, 17])
def test_a_request_whose_kv_and_first_token_came_from_elsewhere(
    driver, make_prompt, length, as_chunk
) -> None:
    """N computed tokens and token N + 1 known: its first step runs as a decode."""
    prompt = make_prompt(length, 10)
    whole = generate(driver, prompt, 9, PENALISED)
    driver.add("elsewhere", 0, prompt, PENALISED, eos=(7,))
    first = driver.step({"elsewhere": length})["elsewhere"]
    blocks = driver.remove("elsewhere", keep_blocks=True)
    driver.add(
        "joined",
        4,
        [*prompt, first],
        PENALISED,
        prompt_len=length,
        computed=length,
        blocks=blocks,
        eos=(7,),
    )
    driver.step({"joined": 1} if as_chunk else {})
    driver.run(7)
    assert driver.tokens["joined"][length:] == whole


def test_a_row_may_leave_the_decode_set_and_come_back(driver, make_prompt) -> None:
    prompt = make_prompt(5, 11)
    alone = generate(driver, prompt, 8)
    driver.add("a", 0, prompt)
    driver.step({"a": 5})
    driver.run(2)
    driver.pause("a")
    driver.add("b", 1, make_prompt(3, 12))
    assert set(driver._run({"b": 3}, [("b", 3)], None)) == {"b"}
    driver.run(5)
    assert driver.tokens["a"][5:] == alone


def test_a_step_may_compute_nothing(driver, make_prompt) -> None:
    assert driver.step() == {}
    driver.add("a", 0, make_prompt(3, 1))
    driver.step({"a": 3})
    driver.remove("a")
    assert driver.step() == {}
    assert driver.last.rows == []


def test_logprobs_come_by_row(driver, make_prompt) -> None:
    sampling = SamplingParams(temperature=0.0, logprobs=2)
    driver.add("quiet", 5, make_prompt(4, 1))
    driver.add("asks", 3, make_prompt(6, 2), sampling)
    sampled = driver.step({"quiet": 4, "asks": 6})
    assert list(driver.last.logprobs_by_row()) == [3]
    found = driver.last.logprobs_by_row()[3][0]
    assert found.token_ids[:2] == [sampled["asks"]] * 2
    assert found.rank == 1
    assert found.logprobs[0] == found.logprobs[1] > found.logprobs[2]
    assert sum(map(math.exp, found.logprobs[1:])) < 1.0


def test_layers_are_handed_on_when_somebody_waits(make_runner, make_driver, make_prompt) -> None:
    listener = SavedLayers()
    runner = make_runner(KVConnector(listener))
    driver = make_driver(lambda step: runner.execute_model(step).get_output())
    driver.add("a", 0, make_prompt(9, 1))
    driver.step({"a": 4}, kv=KVConnectorMetadata(save_kv=True))
    driver.step({"a": 4}, kv=KVConnectorMetadata(save_kv=False))
    driver.step({"a": 1})
    driver.step(kv=KVConnectorMetadata(save_kv=True))
    assert listener.saved == [(1, 0), (1, 1), (1, 2), (4, 0), (4, 1), (4, 2)]


def test_a_dummy_run_leaves_nothing_behind(runner, driver, make_prompt) -> None:
    prompt = make_prompt(10, 1)
    before = generate(driver, prompt, 5, PENALISED)
    driver.step()
    for num_tokens in (1, 5, 160):
        runner.dummy_run(num_tokens)
        assert not runner.states.is_live_np.any()
    assert runner.sampler.penalties.num_used_entries == 0
    assert generate(driver, prompt, 5, PENALISED) == before


def test_the_largest_step_wants_all_that_requests_may(runner, monkeypatch) -> None:
    """Memory is measured by it, so that none is missing once the cache has taken the rest."""
    asked: list[SamplingParams] = []
    add_request = runner.sampler.add_request
    monkeypatch.setattr(
        runner.sampler, "add_request", lambda new: (asked.append(new.sampling), add_request(new))
    )
    runner.dummy_run(160)
    assert len(asked) == runner.states.max_num_reqs
    assert all(
        sampling.needs_penalties
        and sampling.logit_bias
        and sampling.logprobs == sampling.prompt_logprobs == MAX_LOGPROBS
        for sampling in asked
    )


def test_warm_up_leaves_nothing_behind(runner, driver, make_prompt) -> None:
    before = generate(driver, make_prompt(10, 1), 5, PENALISED)
    driver.step()
    fractions = []
    runner.warm_up(fractions.append)
    assert fractions == sorted(fractions) and fractions[-1] == 1.0
    assert not runner.states.is_live_np.any()
    assert runner.sampler.penalties.num_used_entries == 0
    assert generate(driver, make_prompt(10, 1), 5, PENALISED) == before


def test_everything_is_empty_after_all_have_left(runner, driver, make_prompt) -> None:
    for row, sampling in enumerate(KINDS):
        driver.add(str(row), row, make_prompt(5, row), sampling)
        driver.step({str(row): 5})
    for row in range(len(KINDS)):
        driver.remove(str(row))
    assert driver.step() == {}
    assert not runner.states.is_live_np.any()
    assert len(runner._decode_set.rows) == 0
    assert runner.sampler.penalties.num_used_entries == 0


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (SchedulerOutput(step_id=1, finished_rows=[1]), "row 1 is free"),
        (SchedulerOutput(step_id=1, new_block_ids=[(2, [5])]), "row 2 is free"),
        (SchedulerOutput(step_id=1, decode_add=[3]), "row 3 is free"),
        (SchedulerOutput(step_id=1, decode_add=[0]), "row 0 cannot decode: 4 tokens"),
        (SchedulerOutput(step_id=1, prefill_chunks=[(4, 1)]), "row 4 is free"),
        (SchedulerOutput(step_id=1, prefill_chunks=[(0, 5)]), "row 0 has 4 tokens to compute"),
        (SchedulerOutput(step_id=1, finished_rows=[99]), "row 99 does not exist"),
    ],
)
def test_messages_that_do_not_fit_the_rows_are_refused(
    runner, driver, make_prompt, step, words
) -> None:
    driver.add("a", 0, make_prompt(4, 1))
    driver.step()
    with pytest.raises(RowError, match=words):
        runner.execute_model(step)


def test_the_cache_is_written_only_in_the_blocks_of_its_request(
    runner, driver, make_prompt
) -> None:
    driver.add("a", 0, make_prompt(10, 1))
    driver.add("b", 1, make_prompt(17, 2))
    driver.step({"a": 10, "b": 17})
    driver.run(3)
    owned = set(driver.blocks["a"]) | set(driver.blocks["b"])
    for layer in runner.kv_caches:
        written = torch.nonzero(layer.flatten(1).any(dim=1)).flatten().tolist()
        assert set(written) == owned

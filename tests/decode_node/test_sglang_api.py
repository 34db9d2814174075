"""Texts or token ids go in, and both come out, in the shapes of SGLang's /generate."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from engine.contracts.request_spec import RequestSpec
from tests.decode_node.http_node import HttpNode, chunks_of, http_node

IDS = [5, 6, 7]
SAMPLING = {"max_new_tokens": 4, "sampling_seed": 3}


async def post(node: HttpNode, **fields: Any) -> Any:
    response = await node.client.post("/generate", json={"sampling_params": SAMPLING, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def complete(node: HttpNode, **fields: Any) -> list[dict[str, Any]]:
    body = {"max_tokens": 4, "seed": 3, "return_token_ids": True, **fields}
    found: list[dict[str, Any]] = (await node.client.post("/v1/completions", json=body)).json()[
        "choices"
    ]
    return found


async def test_one_prompt_has_one_answer_and_several_have_a_list() -> None:
    async with http_node() as node:
        (theirs,) = await complete(node, prompt=IDS)
        found = await post(node, input_ids=IDS, rid="mine", return_prompt_token_ids=True)
        assert (found["text"], found["output_ids"]) == (theirs["text"], theirs["token_ids"])
        assert found["prompt_token_ids"] == IDS
        assert found["meta_info"] == {
            "id": "mine",
            "finish_reason": {"type": "length", "length": 4},
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "cached_tokens": 0,
        }
        for fields, num_prompts in (
            ({"text": ["the", "dog"], "rid": "r"}, 2),
            ({"text": "the", "sampling_params": {**SAMPLING, "n": 2}, "rid": "r"}, 1),
        ):
            several = await post(node, **fields)
            others = await complete(node, prompt=fields["text"], n=2 // num_prompts)
            assert [one["text"] for one in several] == [one["text"] for one in others]
            assert [one["meta_info"]["id"] for one in several] == ["r_0", "r_1"]
        assert len(await post(node, input_ids=[IDS])) == 1


async def test_log_probabilities_are_lists_of_value_id_and_text() -> None:
    async with http_node() as node:
        wanted = {"return_logprob": True, "top_logprobs_num": 1, "return_text_in_logprobs": True}
        found = await post(node, input_ids=IDS, logprob_start_len=1, **wanted)
        info, ids = found["meta_info"], found["output_ids"]
        texts = {i: node.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in (1, *ids, 7)}
        assert info["output_token_logprobs"] == [[-0.25, i, texts[i]] for i in ids]
        assert info["output_token_logprobs_length"] == 4
        assert info["output_top_logprobs"] == [[[-0.5, 1, texts[1]]]] * 4
        assert [entry[:2] for entry in info["input_token_logprobs"]] == [[None, 6], [-0.5, 7]]
        assert info["input_top_logprobs"] == [None, [[-0.25, 1, texts[1]]]]
        named = await post(node, input_ids=IDS, return_logprob=True, token_ids_logprob=[8, 9])
        info = named["meta_info"]
        assert [len(row) for row in info["output_token_ids_logprobs"]] == [2] * 4
        assert info["output_token_logprobs"][0][2] is None and info["input_token_logprobs"] == []


async def test_no_tokens_may_be_wanted_and_128_are_where_nothing_is_said() -> None:
    async with http_node() as node:
        scored = {"return_logprob": True, "logprob_start_len": 0}
        none = await post(node, input_ids=IDS, sampling_params={"max_new_tokens": 0}, **scored)
        assert (none["text"], none["output_ids"]) == ("", [])
        assert [entry[1] for entry in none["meta_info"]["input_token_logprobs"]] == IDS
        usual = await post(node, input_ids=IDS, sampling_params=None)
        assert usual["meta_info"]["completion_tokens"] == 128
        rest = await post(node, input_ids=IDS, sampling_params={"max_new_tokens": None})
        assert rest["meta_info"]["completion_tokens"] == 256 - len(IDS)


async def test_what_ended_an_answer_is_told() -> None:
    async with http_node(scripts=["the dog"]) as node:
        found = await post(node, text="a")
        assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}
        found = await post(node, text="a", sampling_params={"stop": "dog"})
        assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": "dog"}
        assert found["text"] == "the "


async def test_events_of_a_stream_have_all_so_far_and_are_few() -> None:
    """An event for each token would make an answer of n tokens n * n / 2 long."""
    async with http_node(context=4096) as node:
        sampling = {"max_new_tokens": 2000, "sampling_seed": 3}
        whole = await post(node, input_ids=IDS, sampling_params=sampling)
        body = {"input_ids": IDS, "sampling_params": sampling, "stream": True}
        events = chunks_of((await node.client.post("/generate", json=body)).text)
        assert [len(one["output_ids"]) for one in events[:64]] == list(range(1, 65))
        assert sum(len(one["output_ids"]) for one in events) < 80 * 2000
        for before, after in pairwise(events):
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert all(one["meta_info"]["finish_reason"] is None for one in events[:-1])
        assert events[-1]["text"] == whole["text"]
        assert events[-1]["output_ids"] == whole["output_ids"]
        assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 2000}
        both = {**body, "input_ids": [IDS, IDS], "sampling_params": {**sampling, "n": 4}}
        events = chunks_of((await node.client.post("/generate", json=both)).text)
        assert {one["index"] for one in events} == set(range(8))
        assert sum(len(one["output_ids"]) for one in events) < 80 * 2000


async def test_a_stream_whose_events_tell_usage_ends_without_another() -> None:
    """An event of no bytes would end the answer before `[DONE]`."""
    body = {"input_ids": IDS, "sampling_params": SAMPLING, "stream": True}
    async with http_node(enable_force_include_usage=True) as node:
        headers = {"x-tandem-timeline": "1"}
        response = await node.client.post("/generate", json=body, headers=headers)
        *_, last = chunks_of(response.text)
        assert last["meta_info"]["completion_tokens"] == 4 and last["meta_info"]["timeline"]


async def test_a_stream_tells_the_prompts_tokens_once() -> None:
    """A long prompt in each event would be much more than the answer."""
    body = {"input_ids": IDS, "sampling_params": SAMPLING, "return_prompt_token_ids": True}
    async with http_node() as node:
        response = await node.client.post("/generate", json={**body, "stream": True})
        *events, last = chunks_of(response.text)
        assert last["prompt_token_ids"] == IDS
        assert len(events) == 3 and not any("prompt_token_ids" in event for event in events)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"text": None}, "text", "not both"),
        ({"text": ""}, "text", "empty"),
        ({"text": ["a"] * 65}, "text", "text has 65 prompts, and one request has 64 answers"),
        ({"text": None, "input_ids": [[1]] * 65}, "input_ids", "input_ids has 65 prompts"),
        ({"sampling_params": {"n": 2**64}}, "sampling_params.n", "must be 1 to 64 (--max-choices)"),
        ({"text": None, "input_ids": [[1], []]}, "input_ids", "no tokens"),
        ({"sampling_params": [{}, {}]}, "sampling_params", "must be an object"),
        (
            {"sampling_params": {"max_new_tokens": -1}},
            "sampling_params.max_new_tokens",
            "at least 0",
        ),
        ({"sampling_params": {"regex": "("}}, "sampling_params.regex", "regular expression"),
        ({"sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex", "use stop"),
        ({"return_logprob": True, "stream": True}, "return_logprob", "whole answer"),
        ({"return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num", "between 0 and 20"),
        (
            {"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [8]},
            "logprob_start_len",
            "nothing of the prompt",
        ),
        ({"image_data": ["x"]}, "image_data.0", "takes no images here"),
        ({"image_data": [3]}, "image_data.0", "URL or base64"),
        ({"text": ["a"], "image_data": "x"}, "image_data", "goes with one prompt"),
        ({"session_params": {"id": "a"}}, "session_params", "send the whole prompt"),
        ({"return_hidden_states": True}, "return_hidden_states", "log probabilities"),
    ],
    ids=range(18),
)
async def test_refusals_name_the_field_as_the_client_wrote_it(
    fields: dict[str, Any], param: str, words: str
) -> None:
    async with http_node() as node:
        response = await node.client.post("/generate", json={"text": "a", **fields})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert words in error["message"]


async def test_larger_priorities_run_first_as_in_sglang() -> None:
    """Its servers take larger values first, unless `--schedule-low-priority-values-first`; vLLM,
    whose direction all other paths have, takes smaller ones."""
    async with http_node() as node:
        for sent, expected in ((3, -3), (-(2**31), 2**31 - 1), (None, 0)):
            await post(node, text="a", priority=sent)
            assert node.engine.only.request.spec.priority == expected
            node.engine.forget_ended()


async def test_an_adapter_is_named_in_place_of_the_model() -> None:
    async with http_node() as node:
        fields = {"text": "a", "lora_path": "mine", "model": "tiny"}
        response = await node.client.post("/generate", json=fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (404, "lora_path")
        assert "'mine' does not exist" in error["message"]


async def test_the_model_is_described() -> None:
    async with http_node() as node:
        for path in ("/model_info", "/get_model_info"):
            info = (await node.client.get(path)).json()
            assert (info["served_model_name"], info["model_path"]) == ("tiny", "unused")
            assert info["is_generation"] is True


async def test_its_names_of_probes_and_resets_are_served() -> None:
    async with http_node() as node:
        assert (await node.client.get("/health_generate")).status_code == 200
        known = node.proxy._prefix_index
        prompt, spec = list(range(5, 30)), RequestSpec()
        for method, is_reset in ("HEAD", False), ("GET", True), ("POST", True):
            known.add(prompt, spec)
            assert (await node.client.request(method, "/flush_cache")).status_code == 200
            assert (known.num_cached_tokens(prompt, spec) == [0]) == is_reset, method
        node.state.draining = True
        assert (await node.client.get("/health_generate")).status_code == 503


async def test_what_its_benchmark_sends_besides_changes_nothing() -> None:
    besides = {"lora_path": None, "return_logprob": False, "return_routed_experts": False}
    sampling = {**SAMPLING, "ignore_eos": True, "temperature": 0.0}
    async with http_node(strict_fields=True) as node:
        found = await post(
            node, text="a", sampling_params=sampling, stream=False, logprob_start_len=-1, **besides
        )
        assert found["meta_info"]["completion_tokens"] == 4

"""Prefill and decode on two nodes give what one node gives, token for token."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from bench.serving.clusters.node_metrics import read_metrics
from tests.engine.models.reference_models import FAMILIES, GreedyAnswers, save_checkpoint
from tests.engine.models.reference_models import reference as load

TWO_TOPOLOGIES = [
    pytest.param([], [], id="tp1-tp1-block16-streams4"),
    pytest.param(
        ["--tensor-parallel-size", "2"],
        ["--block-size", "64", "--kv-streams", "1"],
        id="tp2-tp1-block16to64-stream1",
    ),
    pytest.param(
        ["--block-size", "64", "--max-num-batched-tokens", "48", "--pipeline-parallel-size", "2"],
        ["--tensor-parallel-size", "2", "--kv-streams", "8"],
        id="pp2-tp2-block64to16-streams8-chunked",
    ),
    pytest.param(
        ["--kv-processes", "2", "--full-step-tokens", "24"],
        ["--kv-processes", "2", "--kv-streams", "2", "--local-prefill-threshold", "20"],
        id="two-processes-short-prompts-stay-long-ones-in-parts",
    ),
]

REMOTE = ["--local-prefill-threshold", "0"]
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 200]


def prompt(length: int) -> list[int]:
    """Token ids that differ with the length from the first one on."""
    return [(7 * i + length) % 400 + 10 for i in range(length)]


def requests() -> list[dict[str, Any]]:
    greedy = [{"prompt": prompt(n), "temperature": 0.0} for n in LENGTHS]
    sampled = [
        {"prompt": prompt(n), "temperature": 0.9, "top_p": 0.95, "seed": 1000 + n} for n in LENGTHS
    ]
    limited = [
        {**request, "bad_words": ["the", "and"], "allowed_token_ids": list(range(10, 400))}
        for request in (greedy[-1], sampled[-1])
    ]
    forked = [{**request, "n": 3} for request in sampled[3:]]
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    return [{**common, **request} for request in greedy + sampled + limited + forked]


SCHEMA = {
    "type": "object",
    "properties": {"dog": {"type": "boolean"}, "names": {"type": "array", "maxItems": 2}},
    "required": ["dog", "names"],
    "additionalProperties": False,
}


def structured_requests() -> list[dict[str, Any]]:
    form = {"type": "json_schema", "json_schema": {"name": "dogs", "schema": SCHEMA}}
    limits: list[dict[str, Any]] = [
        {"response_format": form, "max_tokens": 200},
        {"guided_regex": "[A-Z][a-z]{2,8}( and [A-Z][a-z]+)?"},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_grammar": 'root ::= "Ada" (" said " [a-z]+)* "."', "max_tokens": 4},
    ]
    return [
        {"prompt": prompt(n), "max_tokens": 24, "temperature": t, "seed": n, **limit}
        for limit in limits
        for n, t in ((17, 0.0), (64, 1.5))
    ]


async def texts(complete: Any, url: str) -> list[str]:
    results = await asyncio.gather(*(complete(url, **request) for request in requests()))
    assert all(r.error is None for r in results)
    assert all(r.usage["completion_tokens"] == 24 * len(r.texts) for r in results)
    asked = structured_requests()
    structured = await asyncio.gather(*(complete(url, **request) for request in asked))
    assert all(r.error is None for r in structured)
    for request, result in zip(asked, structured, strict=True):
        if "response_format" in request and result.usage["completion_tokens"] < 200:
            assert set(json.loads(result.text)) == {"dog", "names"}
    return [r.text for r in (*results, *structured)]


@pytest.fixture(scope="module")
def one_node_texts() -> dict[str, list[str]]:
    """Filled by the first test that needs it."""
    return {}


async def reference(share_cluster: Any, complete: Any, known: dict[str, list[str]]) -> list[str]:
    if "texts" not in known:
        single = await share_cluster(prefill=0, decode=1)
        known["texts"] = await texts(complete, single.decodes[0].url)
    return known["texts"]


@pytest.mark.e2e
@pytest.mark.parametrize(("prefill_args", "decode_args"), TWO_TOPOLOGIES)
async def test_two_nodes_give_what_one_gives(
    share_cluster: Any,
    complete: Any,
    one_node_texts: dict[str, list[str]],
    prefill_args: list[str],
    decode_args: list[str],
) -> None:
    expected = await reference(share_cluster, complete, one_node_texts)
    cluster = await share_cluster(prefill_args=prefill_args, decode_args=decode_args)
    assert await texts(complete, cluster.url) == expected
    assert await texts(complete, cluster.url) == expected, "with the prefix cached"
    await cluster.wait_empty()


@pytest.mark.e2e
async def test_a_tiny_v32_answers_as_transformers_does(
    start_cluster: Any, complete: Any, demo_checkpoint: Path, tmp_path: Path
) -> None:
    """Prompts and answers are longer than what its indexer chooses: 18 tokens."""
    family = FAMILIES["deepseek_v32"]
    sizes = {"vocab_size": 1024, "max_position_embeddings": 512, "mlp_layer_types": None}
    save_checkpoint(replace(family, changes={**family.changes, **sizes}), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_checkpoint / name, tmp_path)
    model = ["--model", str(tmp_path)]
    ways = {"prefill_args": [*model, "--block-size", "64"], "decode_args": [*model, *REMOTE]}
    cluster = await start_cluster(**ways)
    oracle, tokenizer = (
        GreedyAnswers(load(tmp_path)),
        Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
    )
    for length in (15, 65, 200, 200):
        expected = tokenizer.decode(oracle.tokens(prompt(length), 24))
        wish = {"prompt": prompt(length), "max_tokens": 24, "ignore_eos": True}
        answer = await complete(cluster.url, **wish, temperature=0.0)
        assert (answer.error, answer.text) == (None, expected)
        assert answer.timeline["kv_bytes"] > 0
    await cluster.wait_empty()


@pytest.mark.e2e
@pytest.mark.parametrize("topology", [0, 2])
async def test_choices_are_the_answers_of_their_seeds(
    share_cluster: Any, complete: Any, topology: int
) -> None:
    """KV of the prompt is pulled once for eight choices."""
    prefill_args, decode_args = TWO_TOPOLOGIES[topology].values
    cluster = await share_cluster(prefill_args=prefill_args, decode_args=decode_args)
    wish = {"prompt": prompt(203), "temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    together = await complete(cluster.url, **wish, seed=50, n=8)
    assert together.usage["prompt_tokens"] == 203
    alone = [await complete(cluster.url, **wish, seed=50 + i) for i in range(8)]
    assert [together.texts[i] for i in range(8)] == [one.text for one in alone]
    # A path that a busy machine slows down is left out meanwhile: nothing is pulled then.
    pulled = [one.timeline["kv_bytes"] for one in alone if one.timeline["path"] == "remote"]
    assert pulled and together.timeline["kv_bytes"] <= 1.02 * min(pulled)
    assert len(set(together.texts.values())) == 8
    await cluster.wait_empty()


FIELDS: list[dict[str, Any]] = [
    {"logprobs": 3, "prompt_logprobs": 0},
    {"echo": True, "logprobs": 2, "max_tokens": 1},
    {"logprobs": 1, "logprob_token_ids": [0, 5, 1023]},
    {"n": 3, "seed": 2**63 - 1, "logprobs": 2, "prompt_logprobs": 1, "temperature": 1.0},
    {"seed": -(2**63), "temperature": 100.0, "min_p": 0.001},
    {"temperature": 1e-30, "seed": 2**64 - 1},
    {"presence_penalty": 2, "frequency_penalty": -2, "temperature": 0.7, "seed": 1},
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 100.0, "presence_penalty": -2},
    {"logit_bias": {str(i): (i % 201) - 100 for i in range(1024)}},
    {"logit_bias": {str(i): -100 for i in range(1024)}},
    {"stop": ["e", "nd"], "include_stop_str_in_output": True, "max_tokens": 40},
    {"stop": ["e", "a"], "min_tokens": 8},
    {"stop_token_ids": [*range(10, 266)], "min_tokens": 11},
    {"ignore_eos": False, "min_tokens": 30, "max_tokens": 60, "temperature": 1.0, "seed": 9},
    {"allowed_token_ids": [1, 5], "ignore_eos": False},
    {"guided_regex": "[a-z ]+", "stop": ["e"], "logprobs": 2, "ignore_eos": False},
    {"guided_choice": ["yes", "no"], "bad_words": ["yes"], "min_tokens": 4, "ignore_eos": False},
    {"truncate_prompt_tokens": 50, "truncation_side": "right"},
    {"cache_salt": "\0\U0001f600"},
    {"prompt": prompt(2047), "max_tokens": 5},
    {"prompt": prompt(2040), "max_tokens": 8, "logprobs": 0},
]
"""Fields of requests at their limits."""


def without_ranks(answer: Any) -> Any:
    """Returns an answer without the ranks of tokens, of which many are nearly as likely."""
    if isinstance(answer, dict):
        return {key: without_ranks(value) for key, value in answer.items() if key != "rank"}
    return [without_ranks(value) for value in answer] if isinstance(answer, list) else answer


def nearly(answer: Any) -> Any:
    """Returns what equals an answer whose floats come from sums in another order."""
    if isinstance(answer, dict):
        return {key: nearly(value) for key, value in answer.items()}
    if isinstance(answer, list):
        return [nearly(value) for value in answer]
    return pytest.approx(answer, abs=1e-3) if isinstance(answer, float) else answer


@pytest.mark.e2e
async def test_each_field_means_the_same_on_two_nodes(share_cluster: Any, http: Any) -> None:
    single = await share_cluster(prefill=0, decode=1)
    prefill_args, decode_args = TWO_TOPOLOGIES[2].values
    cluster = await share_cluster(prefill_args=prefill_args, decode_args=decode_args)

    async def choices(url: str, fields: dict[str, Any]) -> list[Any]:
        common = {"prompt": prompt(200), "max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
        body = {**common, "return_token_ids": True, **fields}
        async with http.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json()
        assert response.status == 200, answer
        return [without_ranks(answer["choices"]), answer["usage"]["completion_tokens"]]

    alone = await asyncio.gather(*(choices(single.decodes[0].url, one) for one in FIELDS))
    expected = nearly(alone)
    for _ in range(2):
        assert await asyncio.gather(*(choices(cluster.url, one) for one in FIELDS)) == expected
    await cluster.wait_empty()
    await single.wait_empty()


BEAMS = [
    {"prompt": prompt(n), "use_beam_search": True, "best_of": 4, "max_tokens": 12, **more}
    for n, more in (
        (1, {}),
        (17, {"n": 2, "length_penalty": 0.5}),
        (64, {"n": 4, "early_stopping": True, "logprobs": 2}),
        (200, {"early_stopping": "never", "ignore_eos": True}),
        (201, {"max_tokens": 1, "n": 3}),
    )
]


@pytest.mark.e2e
async def test_beams_fork_behind_a_prompt_from_elsewhere(share_cluster: Any, http: Any) -> None:
    """The prefill node gives the candidates of the first token."""
    single = await share_cluster(prefill=0, decode=1)
    prefill_args, decode_args = TWO_TOPOLOGIES[2].values
    cluster = await share_cluster(prefill_args=prefill_args, decode_args=decode_args)

    async def choices(url: str, body: dict[str, Any]) -> list[Any]:
        async with http.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json()
        assert response.status == 200, answer
        tokens = answer["usage"]["completion_tokens"]
        assert tokens > 0 and len(answer["choices"]) == body.get("n", 1)
        for choice in answer["choices"]:
            if (told := choice.pop("logprobs", None)) is not None:
                assert len(told["tokens"]) == len(told["top_logprobs"]) > 0
                assert min(len(top) for top in told["top_logprobs"]) >= 2
        return [answer["choices"], tokens]

    expected = [await choices(single.decodes[0].url, body) for body in BEAMS]
    for _ in range(2):
        assert await asyncio.gather(*(choices(cluster.url, body) for body in BEAMS)) == expected
    await cluster.wait_empty()
    await single.wait_empty()


@pytest.mark.e2e
async def test_timeline_tells_what_happened(share_cluster: Any, complete: Any) -> None:
    prefill_args, decode_args = TWO_TOPOLOGIES[0].values
    cluster = await share_cluster(prefill_args=prefill_args, decode_args=decode_args)
    first = await complete(cluster.url, prompt=prompt(201), max_tokens=8, ignore_eos=True)
    again = await complete(cluster.url, prompt=prompt(201), max_tokens=8, ignore_eos=True)
    for result in (first, again):
        timeline = result.timeline
        assert timeline["path"] == "remote"
        assert timeline["prefill_node"] == cluster.prefills[0].address
        assert timeline["kv_bytes"] > 0 and timeline["kv_streams"] >= 1
        assert 0 < timeline["first_token_s"] <= timeline["second_token_s"] <= timeline["total_s"]
        assert 0 < timeline["kv_first_byte_s"] <= timeline["kv_last_byte_s"]
    assert first.timeline["cached_tokens"] == 0
    assert again.timeline["cached_tokens"] >= 176
    cached = again.usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == again.timeline["cached_tokens"]
    await cluster.wait_empty()


@pytest.mark.e2e
async def test_short_prompts_stay_on_decode(share_cluster: Any, complete: Any) -> None:
    prefill_args, decode_args = TWO_TOPOLOGIES[-1].values
    cluster = await share_cluster(prefill_args=prefill_args, decode_args=decode_args)
    short = await complete(cluster.url, prompt=prompt(20), max_tokens=4, ignore_eos=True)
    long = await complete(cluster.url, prompt=prompt(200), max_tokens=4, ignore_eos=True)
    assert (short.timeline["path"], long.timeline["path"]) == ("local", "remote")
    await cluster.wait_empty()


SHARING = ["--kv-share-prefixes", "always"]
CACHING = ["--local-prefill-threshold", "0", "--enable-prefix-caching", *SHARING]


@pytest.mark.e2e
async def test_decode_pulls_only_what_it_lacks(share_cluster: Any, complete: Any) -> None:
    cluster = await share_cluster(prefill_args=SHARING, decode_args=CACHING)
    request = {"prompt": prompt(200), "max_tokens": 8, "ignore_eos": True, "temperature": 0.0}
    first = await complete(cluster.url, **request)
    again = await complete(cluster.url, **request)
    assert again.text == first.text
    blocks, cached_blocks = 13, 12
    assert again.timeline["kv_bytes"] * blocks == first.timeline["kv_bytes"] * (
        blocks - cached_blocks
    )
    await cluster.wait_empty()


@pytest.mark.e2e
async def test_an_answers_kv_goes_back_to_prefill(
    share_cluster: Any, http: aiohttp.ClientSession
) -> None:
    """Asked again, the second turn has all of it cached, and the same answer. A decode node that is
    paused when it is asked for it gives nothing: then this is done again with another prompt."""
    cluster = await share_cluster(prefill_args=SHARING, decode_args=CACHING)

    async def ask(tokens: list[int]) -> list[int]:
        body = {"prompt": tokens, "max_tokens": 40, "ignore_eos": True, "temperature": 0.0}
        body |= {"return_token_ids": True}
        async with http.post(f"{cluster.url}/v1/completions", json=body) as response:
            answer = await response.json()
        assert response.status == 200, answer
        return answer["choices"][0]["token_ids"]

    async def pulled() -> float:
        metrics = await read_metrics(http, cluster.prefills[0].metrics_url)
        return metrics["tandem_kv_transfer_prefix_pulled_tokens_total"]

    for length in range(1100, 1500, 50):
        tokens = prompt(length)
        tokens += await ask(tokens)
        turn, before = [*tokens, *prompt(20)], await pulled()
        second = await ask(turn)
        count = await pulled() - before
        assert second == await ask(turn)
        # The prompt ends inside of a block; the answer's last token has no KV yet.
        if count > 0:
            assert count == (len(tokens) - 1) // 16 * 16 - length // 16 * 16
            break
    else:
        pytest.fail("nothing was ever pulled")
    await cluster.wait_empty()

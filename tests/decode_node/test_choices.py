"""Choices of one prompt are one request to the engine and to prefill nodes, and one choice each to
the client."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator

import pytest

from decode_node.observe.timeline import PrefillRecord, RequestRecord
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.frontend.input_processor import GenerationRequest
from engine.frontend.output_processor import RequestOutput
from tests.decode_node.decode_fakes import (
    NUM_BLOCKS,
    FakeRequest,
    collect,
    outputs_of,
    token_at,
    until,
)
from tests.decode_node.http_node import http_node
from tests.decode_node.test_proxy import A, B, Bench

PROMPT = list(range(1, 21))
REMOTE = {"x-prefiller-host-port": "a:1"}


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.check_empty()


def start(
    bench: Bench, num_choices: int = 3, max_tokens: int = 6
) -> tuple[asyncio.Task[list[RequestOutput]], list[RequestRecord]]:
    sampling = SamplingParams(max_tokens=max_tokens, seed=10)
    spec = RequestSpec(PROMPT, sampling, sibling_seeds=tuple(range(11, 10 + num_choices)))
    names = tuple(f"c{i}" for i in range(num_choices))
    request = GenerationRequest("p", spec, choice_ids=names)
    prefill = PrefillRecord()
    records = [RequestRecord(len(PROMPT), prefill=prefill) for _ in names]
    stream = outputs_of(bench.proxy, request, records, [A, B])
    return asyncio.create_task(collect(stream)), records


def tokens_by_choice(outputs: list[RequestOutput]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for output in outputs:
        found[output.request_id] += output.token_ids
    return found


def expected(num_choices: int, count: int) -> dict[str, list[int]]:
    return {
        f"c{c}": [token_at(len(PROMPT) + i, 10 + c) for i in range(count)]
        for c in range(num_choices)
    }


async def finish(bench: Bench, fakes: list[FakeRequest]) -> None:
    for fake in fakes:
        while not fake.finished:
            bench.engine.produce(fake)


async def test_one_call_and_one_pull_for_all(bench: Bench) -> None:
    task, records = start(bench)
    call = await bench.nodes.called()
    assert call.request.spec.seeds == (10, 11, 12)
    # 20 tokens are two full blocks of 8; each choice has 26 tokens, and so two blocks more.
    assert (bench.credits.num_free, bench.credits.num_claims) == (NUM_BLOCKS - 2 - 3 * 2, 3)
    call.first_token()
    await until(lambda: all(record.first_token_at for record in records), "first tokens")
    fakes = list(bench.engine.requests.values())
    bench.engine.kv_arrives(fakes[0])
    call.taken()
    await until(lambda: records[0].prefill.kv is not None, "the transfer is noted")
    await finish(bench, fakes[:1])
    await until(lambda: bench.credits.num_claims == 2, "the first choice gave its seat back")
    assert bench.credits.num_free == NUM_BLOCKS - 2 - 2 * 2
    await finish(bench, fakes)
    assert tokens_by_choice(await task) == expected(3, 6)
    assert len(bench.nodes.calls) == 1
    for record in records:
        timeline = record.timeline()
        assert (timeline.path, timeline.attempts, timeline.kv_bytes) == ("remote", 1, 4096)
        assert timeline.first_token_s <= (timeline.second_token_s or 0) <= timeline.total_s


@pytest.mark.parametrize("has_token", [False, True])
async def test_a_prefill_node_that_dies_is_replaced_for_all(bench: Bench, has_token: bool) -> None:
    """The client gets each first token once, whichever node drew them."""
    task, records = start(bench)
    call = await bench.nodes.called()
    fakes = list(bench.engine.requests.values())
    if has_token:
        call.first_token()
        await until(lambda: fakes[2].has_first_token, "first tokens")
        bench.engine.kv_arrives(fakes[0], ok=False)
    else:
        call.fail()
    second = await bench.nodes.called(2)
    assert (second.address, second.params.attempt) == (B, 1)
    assert second.request.spec.seeds == (10, 11, 12)
    second.first_token()
    await until(lambda: fakes[2].has_first_token, "first tokens")
    bench.engine.kv_arrives(fakes[0], attempt=1)
    second.taken()
    await finish(bench, fakes)
    assert tokens_by_choice(await task) == expected(3, 6)
    assert records[2].timeline().attempts == 2


async def test_without_prefill_nodes_the_prompt_is_computed_here_once(bench: Bench) -> None:
    bench.nodes.unreachable = {A, B}
    task, records = start(bench)
    await bench.engine.added(3)
    assert [fake.params for fake in bench.engine.requests.values()] == [None] * 3
    await finish(bench, list(bench.engine.requests.values()))
    assert tokens_by_choice(await task) == expected(3, 6)
    assert records[1].timeline().path == "local"


async def test_one_token_each_needs_no_kv_and_no_room(bench: Bench) -> None:
    blocker = bench.credits.claim_now(NUM_BLOCKS * 8, 1)
    task, _ = start(bench, max_tokens=1)
    call = await bench.nodes.called()
    assert call.params.first_token_only
    call.first_token()
    outputs = await task
    assert tokens_by_choice(outputs) == expected(3, 1)
    assert [output.finish_reason for output in outputs] == ["length"] * 3
    blocker.release()


async def test_closing_the_stream_ends_every_choice_and_the_call(bench: Bench) -> None:
    task, _ = start(bench)
    call = await bench.nodes.called()
    call.first_token()
    fakes = list(bench.engine.requests.values())
    await until(lambda: fakes[0].has_first_token, "first tokens")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [fake.aborted for fake in fakes] == [True] * 3
    await until(lambda: not call.is_open, "the call has ended")


# Over HTTP ---------------------------------------------------------------------------------------


async def test_several_prompts_times_n() -> None:
    """Each prompt is one prefill; choices draw with seed + i; usage counts each prompt once."""
    async with http_node() as node:
        node.nodes.on_call = lambda call: (call.first_token(), call.taken())
        node.engine.on_generate = lambda fake: node.engine.kv_arrives(fake)
        body = {"prompt": [[5, 6, 7], [8, 9]], "n": 3, "seed": 40, "max_tokens": 4}
        extra = {"return_token_ids": True}
        reply = await node.client.post("/v1/completions", json={**body, **extra}, headers=REMOTE)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        assert [call.request.spec.seeds for call in node.nodes.calls] == [(40, 41, 42)] * 2
        for choice in answer["choices"]:
            prompt, number = divmod(choice["index"], 3)
            start = len(body["prompt"][prompt])  # type: ignore[index]
            tokens = [token_at(start + i, 40 + number) for i in range(4)]
            assert choice["token_ids"] == tokens
        assert answer["usage"]["prompt_tokens"] == 5
        assert answer["usage"]["completion_tokens"] == 24
        metrics = await node.metrics()
        assert metrics["tandem_prefill_attempts_total"] == 2


async def test_each_prompt_is_computed_where_its_router_says() -> None:
    """The third prompt goes where the first does, and only names of the first two are known."""
    places = "00000000000000ab/b:1,a:1"
    headers = {**REMOTE, "x-tandem-prefix": "00000000000000aa", "x-tandem-prompt-places": places}
    async with http_node() as node:
        node.nodes.on_call = lambda call: (call.first_token(), call.taken())
        node.engine.on_generate = lambda fake: node.engine.kv_arrives(fake)
        body = {"prompt": [[5, 6, 7], [8, 9], [4, 3]], "max_tokens": 4}
        reply = await node.client.post("/v1/completions", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        calls = sorted(node.nodes.calls, key=lambda call: call.request.request_id)
        assert [call.address for call in calls] == ["a:1", "b:1", "a:1"]
        assert [call.request.spec.prefix_hash for call in calls] == [0xAA, 0xAB, 0]
        assert reply.json()["usage"]["prompt_tokens"] == 7
        bad = {**headers, "x-tandem-prompt-places": "/not a node"}
        reply = await node.client.post("/v1/completions", json=body, headers=bad)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-prefiller-host-port")


async def test_after_a_resume_only_choices_without_output_share_their_prompt() -> None:
    """One choice has ended and one is under way; the router has nothing of three others."""
    entries = [
        ["start", 1763700000, [40, 41, 42, 43, 44]],
        ["cached", 1, 0],
        ["tokens", 1, [token_at(3, 41), token_at(4, 41)]],
        ["tokens", 3, [token_at(3 + i, 43) for i in range(4)]],
        ["end", 3, "length", None],
    ]
    body = {"prompt": [5, 6, 7], "n": 5, "seed": 40, "max_tokens": 4, "return_token_ids": True}
    raw = json.dumps(body).encode()
    headers = {"x-tandem-journal": "1", "x-tandem-resume": str(len(raw))}
    async with http_node() as node:
        reply = await node.client.post(
            "/v1/completions", content=raw + json.dumps(entries).encode(), headers=headers
        )
        assert reply.status_code == 200, reply.text
        (answer,) = re.findall(r"^data: (\{.*\})$", reply.text, re.M)
        choices = {choice["index"]: choice for choice in json.loads(answer)["choices"]}
        for index in range(5):
            tokens = [token_at(3 + i, 40 + index) for i in range(4)]
            assert choices[index]["token_ids"] == tokens, index
        seeds = [[f.request.spec.sampling.seed for f in p] for p in node.engine.prompts.values()]
        assert sorted(seeds) == [[40, 42, 44], [41]]

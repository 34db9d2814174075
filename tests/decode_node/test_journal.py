"""An answer that another node continues is, byte for byte, the answer of one node."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from datetime import datetime, tzinfo
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.answer import answer
from decode_node.answer.journal import read_resume
from edge.http.answers.answer_times import read_answer_times
from edge.http.answers.kept_response import KeptResponse
from edge.http.errors import BadRequest
from edge.http.event_loop import long_work
from engine.frontend.templates import chat_template
from engine.frontend.templates.chat_template import ChatTemplate
from engine.frontend.tokenizer import Tokenizer
from tests.decode_node.http_node import HttpNode, http_node
from tests.engine.frontend.small_tokenizers import byte_level_backend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
ASK = {"x-tandem-journal": "1", "x-request-id": "r1"}
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def tell_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "JOURNAL_INTERVAL_S", 0.0)


def entries_of(event: str) -> list[str]:
    return re.findall(r"^: (\d+ .+)$", event, re.M)


def data_of(event: str) -> str:
    return "\n".join(line for line in event.split("\n") if not line.startswith(":"))


def resume_of(events: list[str]) -> bytes:
    entries = [entry.partition(" ")[2] for event in events for entry in entries_of(event)]
    return f"[{','.join(entries)}]".encode()


async def ask(
    node: HttpNode,
    path: str,
    body: dict[str, Any],
    known: list[str] | None = None,
    **more: str,
) -> list[str]:
    """Events of an answer; `known`: those of it that another node gave. `more` headers."""
    raw, headers = json.dumps(body).encode(), {**ASK, **more}
    if known:
        headers["x-tandem-resume"] = str(len(raw))
        raw += resume_of(known)
    response = await node.client.post(path, content=raw, headers=headers)
    assert response.status_code == 200, response.text
    number = int(response.headers["x-tandem-journal"])
    assert number == sum(len(entries_of(event)) for event in known or [])
    assert response.text.endswith("\n\n")
    events = response.text.removesuffix("\n\n").split("\n\n")
    found = [int(entry.split(" ")[0]) for event in events for entry in entries_of(event)]
    assert found == list(range(number, number + len(found)))
    return events


def without_cache_note(events: list[str]) -> list[str]:
    return [data for event in events if (data := re.sub(r'"created":\d+', "", data_of(event)))]


WRITTEN = {
    "skip_special_tokens": False, "return_tokens_as_token_ids": True, "request_id": "mine",
    "stream_options": {"continuous_usage_stats": True},
}  # fmt: skip
BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 7, "seed": 5}),
    (COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 7, "logprobs": 2, "seed": 1}),
    (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "max_tokens": 4, "seed": 9}),
    (COMPLETIONS, {"prompt": "abc", "echo": True, "max_tokens": 5, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": "abc", "echo": True, "logprobs": 2, "max_tokens": 5}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 5, "n": 3}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 4, "n": 2, "return_token_ids": True, **WRITTEN}),
    (
        COMPLETIONS,
        {
            "prompt": "abc",
            "max_tokens": 5,
            "logprobs": 0,
            "truncate_prompt_tokens": 2,
            "logprob_token_ids": [7, 8],
            **WRITTEN,
        },
    ),
    (
        GENERATE,
        {
            "token_ids": [1, 2, 3],
            "sampling_params": {"n": 2, "max_tokens": 4, "logprobs": 2},
            "return_token_ids": True,
            "output_mode": "text",
        },
    ),
    ("/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 4, "n": 2}}),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "fields"), BODIES)
async def test_wherever_it_is_cut_it_goes_on(
    path: str, fields: dict[str, Any], stream: bool
) -> None:
    body: dict[str, Any] = {**fields, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True, **fields.get("stream_options", {})}
    async with http_node() as first, http_node() as second:
        whole = await ask(first, path, body)
        assert whole[-1] == "data: [DONE]"
        for cut in range(1, len(whole) if stream else len(whole) - 1):
            rest = await ask(second, path, body, whole[:cut])
            assert without_cache_note(whole[:cut]) + without_cache_note(rest) == without_cache_note(
                whole
            )
            created = re.search(r'"created":(\d+)', whole[-2])
            assert created is None or all(
                created[1] in found for found in re.findall(r'"created":(\d+)', "".join(rest))
            )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "fields"), [BODIES[i] for i in (0, 3, 6, 9, 10)])
async def test_an_aborted_answer_ends_with_what_there_is_of_it(
    path: str, fields: dict[str, Any], stream: bool
) -> None:
    """Its node has died, and an operator wants its end: the next one computes nothing."""
    body = {**fields, "stream": stream}
    async with http_node() as first, http_node() as second:
        whole = await ask(first, path, body)
        known = whole[:3]
        rest = await ask(second, path, body, known, **{"x-tandem-aborted": "1"})
        assert not second.engine.requests and rest[-1] == "data: [DONE]"
        told, all_told = ("".join(map(data_of, events)) for events in (rest, whole))
        assert told.count(':"abort"') == len(re.findall(r':"(?:length|stop)"', all_told)) > 0
        if stream or path == "/generate":
            return
        answer = json.loads(data_of(rest[-2]).removeprefix("data: "))
        begun = read_resume(resume_of(known)).choices
        assert answer["usage"]["completion_tokens"] == sum(len(one.token_ids) for one in begun) > 0
        expected = json.loads(data_of(whole[-2]).removeprefix("data: "))["choices"]
        for one, other in zip(answer["choices"], expected, strict=True):
            assert path == CHAT or other["text"].startswith(one["text"])


async def test_an_aborted_answer_has_the_text_that_waited_for_more() -> None:
    """The beginning of a stop string is held back until it is known to be none."""
    async with http_node() as first, http_node() as second:
        plain = {"prompt": [1, 2, 3], "max_tokens": 12, "seed": 3}
        text = (await first.client.post(COMPLETIONS, json=plain)).json()["choices"][0]["text"]
        body = {**plain, "stop": [f"{text[4:7]}!"], "stream": True}
        known = (await ask(first, COMPLETIONS, body))[:2]
        rest = await ask(second, COMPLETIONS, body, known, **{"x-tandem-aborted": "1"})
        told = [json.loads(data_of(event).removeprefix("data: ")) for event in [*known, *rest[:-1]]]
        texts = [event["choices"][0]["text"] for event in told]
        tokens = read_resume(resume_of(known)).choices[0].token_ids
        assert "".join(texts) == second.tokenizer.decode(tokens) and texts[-1]


async def test_tokens_that_wait_for_others_are_told_by_the_node_that_goes_on() -> None:
    """Events with all of an answer so far come more seldom the longer it is."""
    sampling = {"max_new_tokens": 70, "sampling_seed": 5}
    body = {"input_ids": [1, 2], "sampling_params": sampling, "stream": True}
    async with http_node() as first, http_node() as second:
        whole = await ask(first, "/generate", body)
        assert len(whole) < 70
        for cut in (1, 64, 65, len(whole) - 2):
            rest = await ask(second, "/generate", body, whole[:cut])
            assert [*map(data_of, whole[:cut]), *map(data_of, rest)] == [*map(data_of, whole)]


async def test_tokens_that_wait_long_are_noted_before_they_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A router would take their node for one that is stuck."""
    monkeypatch.setattr(answer, "_WAITING_INTERVAL_S", 0.0)
    sampling = {"max_new_tokens": 12, "sampling_seed": 5, "n": 16}
    body = {"input_ids": [1, 2], "sampling_params": sampling, "stream": True}
    async with http_node() as first, http_node() as second:
        whole = await ask(first, "/generate", body)
        alone = [i for i, event in enumerate(whole) if entries_of(event) and not data_of(event)]
        assert len(alone) > 16
        for cut in (alone[0] + 1, alone[-1] + 1):
            rest = await ask(second, "/generate", body, whole[:cut])
            ends = [event for event in [*whole[:cut], *rest] if '"length":12' in event]
            told = sorted(data_of(event) for event in ends)
            assert told == sorted(data_of(event) for event in whole if '"length":12' in event)
            assert len(told) == 16 and rest[-1] == "data: [DONE]"


async def test_prompt_logprobs_are_computed_again_and_not_told() -> None:
    body = {"prompt": [1, 2, 3], "prompt_logprobs": 2, "max_tokens": 4, "n": 2}
    async with http_node() as first, http_node() as second:
        whole = await ask(first, COMPLETIONS, body)
        assert [entry[:9] for event in whole for entry in entries_of(event)] == ['0 ["start']
        rest = await ask(second, COMPLETIONS, body, whole[:1])
        assert without_cache_note(rest) == without_cache_note(whole)


@pytest.mark.parametrize("is_shown", [False, True])
async def test_a_stop_string_that_spans_the_cut_is_found(is_shown: bool) -> None:
    async with http_node() as first, http_node() as second:
        plain = {"prompt": [1, 2, 3], "max_tokens": 12, "seed": 3}
        text = (await first.client.post(COMPLETIONS, json=plain)).json()["choices"][0]["text"]
        stop = text[4:8]
        for stream in (True, False):
            body = {**plain, "stop": [stop], "stream": stream}
            body["include_stop_str_in_output"] = is_shown
            whole = await ask(first, COMPLETIONS, body)
            assert '"stop_reason":' in whole[-2]
            for cut in range(1, len(whole) if stream else len(whole) - 1):
                rest = await ask(second, COMPLETIONS, body, whole[:cut])
                found = without_cache_note([*whole[:cut], *rest])
                assert found == without_cache_note(whole)


async def test_without_a_seed_the_first_node_s_draw_goes_on() -> None:
    body = {"prompt": [1, 2], "max_tokens": 6, "n": 2, "stream": True, "logprobs": 0}
    async with http_node() as first, http_node() as second:
        whole = await ask(first, COMPLETIONS, body)
        rest = await ask(second, COMPLETIONS, body, whole[:4])
        assert without_cache_note(rest) == without_cache_note(whole[4:])


async def test_a_client_without_a_router_sees_nothing_of_it() -> None:
    body = {"prompt": [1], "max_tokens": 3, "stream": True}
    async with http_node() as node:
        response = await node.client.post(COMPLETIONS, json=body)
        assert "x-tandem-journal" not in response.headers
        assert "\n:" not in response.text
        assert not response.text.startswith(":")


async def test_a_node_that_faces_clients_ignores_what_only_a_router_says() -> None:
    body = json.dumps({"prompt": [1], "max_tokens": 3, "stream": True}).encode()
    headers = {**ASK, "x-tandem-resume": str(len(body)), "x-tandem-cache-salt": "other"}
    async with http_node(trust_router_headers=False) as node:
        response = await node.client.post(COMPLETIONS, content=body, headers=headers)
        assert "x-tandem-journal" not in response.headers
        assert not response.text.startswith(":")
        assert node.engine.only.request.spec.cache_salt == ""


async def test_the_tenant_s_salt_cannot_be_left() -> None:
    async with http_node() as node:
        body = {"prompt": [1], "max_tokens": 1, "cache_salt": "mine"}
        await node.client.post(COMPLETIONS, json=body, headers={"x-tandem-cache-salt": "T"})
        assert node.engine.only.request.spec.cache_salt == "T/mine"
    async with http_node() as node:
        body = {"prompt": [1], "max_tokens": 1, "extra_key": "run 2"}
        await node.client.post("/v1/completions", json=body)
        assert node.engine.only.request.spec.cache_salt == "run 2"


async def test_a_node_that_stops_says_that_others_may_go_on() -> None:
    body = {"prompt": [1], "max_tokens": 5, "stream": True, "logprobs": 0}
    for stop in ("drain", "engine dies"):
        async with http_node(auto=False) as node:
            running = asyncio.create_task(node.client.post(COMPLETIONS, json=body, headers=ASK))
            fake = await node.engine.added()
            node.engine.produce(fake, 2)
            while not node.state.heartbeats._pulses:
                await asyncio.sleep(0.001)
            node.proxy.abort_all() if stop == "drain" else node.engine.die()
            events = (await running).text.removesuffix("\n\n").split("\n\n")
            assert events[-1].startswith(':! 503\ndata: {"error"')
            assert "[DONE]" not in events[-1]


@pytest.mark.parametrize(("said", "status"), [("", 500), ("nothing can follow", 400)])
async def test_an_error_of_the_request_is_final(said: str, status: int) -> None:
    """An error with a reason is the request's own fault, and the client reads it."""
    body = {"prompt": [1], "max_tokens": 5, "stream": True, "logprobs": 0}
    async with http_node(auto=False) as node:
        running = asyncio.create_task(node.client.post(COMPLETIONS, json=body, headers=ASK))
        fake = await node.engine.added()
        node.engine.produce(fake, 1)
        while not node.state.heartbeats._pulses:
            await asyncio.sleep(0.001)
        node.engine.produce(fake, 1, finish_reason="error", error=said)
        events = (await running).text.removesuffix("\n\n").split("\n\n")
        assert events[-1].startswith(f':x {status}\ndata: {{"error"')
        assert said in events[-1]


async def test_a_silent_answer_gets_heartbeats_and_a_lively_one_none() -> None:
    body = {"prompt": [1], "max_tokens": 4, "stream": True, "logprobs": 0}
    async with http_node(auto=False) as node:
        running = asyncio.create_task(node.client.post(COMPLETIONS, json=body, headers=ASK))
        fake = await node.engine.added()
        node.engine.produce(fake, 1)
        beats = node.state.heartbeats
        while not beats._pulses:
            await asyncio.sleep(0.001)
        await beats.beat()
        (pulse,) = beats._pulses
        pulse.sent_at -= 5
        await beats.beat()
        await beats.beat()
        node.engine.produce(fake, 3)
        events = (await running).text.split("\n\n")
        assert events.count(":") == 1
        assert not beats._pulses


@pytest.mark.parametrize(
    "resume",
    [
        b"", b"{}", b"[]", b"[1]", b'[["tokens",0,[1]]]', b'[["start",1,[1,2]]]',
        b'[["start",1,[1]],["tokens",1,[1]]]', b'[["start",1,[1]],["tokens",0,[100000]]]',
        b'[["start",1,[1]],["tokens",0,[1,2,3,4,5]]]', b"[" * 100_000,
    ],
)  # fmt: skip
async def test_what_cannot_be_resumed_is_refused(resume: bytes) -> None:
    body = json.dumps({"prompt": [1], "max_tokens": 5}).encode()
    async with http_node() as node:
        headers = {**ASK, "x-tandem-resume": str(len(body))}
        response = await node.client.post(COMPLETIONS, content=body + resume, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "resume"


@given(st.binary(max_size=80) | st.text('[]{}",:0129startokenscachedlogp- ').map(str.encode))
def test_nothing_that_is_read_breaks_the_reader(data: bytes) -> None:
    try:
        resume = read_resume(data)
    except BadRequest:
        return
    assert resume.num_entries >= 1


def with_template(source: str) -> Tokenizer:
    return Tokenizer(byte_level_backend(), ChatTemplate(source, {}))


async def resumed_elsewhere(old: str, new: str, path: str, body: dict[str, Any]) -> httpx.Response:
    """Returns what a node with the template `new` makes of an answer that one with `old` began."""
    async with http_node(tokenizer=with_template(old)) as first:
        begun = (await ask(first, path, body))[:3]
    raw = json.dumps(body).encode()
    async with http_node(tokenizer=with_template(new)) as second:
        headers = {**ASK, "x-tandem-resume": str(len(raw))}
        return await second.client.post(path, content=raw + resume_of(begun), headers=headers)


@pytest.mark.parametrize("padding", [0, 1 + long_work.LONG_BODY])
async def test_an_answer_does_not_go_on_behind_another_prompt(padding: int) -> None:
    """A roll to another chat template ended answers that no prompt has."""
    body = {"messages": MESSAGES, "max_tokens": 6, "stream": True, "metadata": {"a": "x" * padding}}
    old, new = "{{ messages[0].content }}", "now {{ messages[0].content }}"
    refused = await resumed_elsewhere(old, new, CHAT, body)
    assert refused.status_code == 503, refused.text
    assert refused.json()["error"]["code"] == "another_prompt"
    same = await resumed_elsewhere(old, old + "{# only a remark #}", CHAT, body)
    assert same.status_code == 200 and same.text.endswith("data: [DONE]\n\n")
    alike = {"prompt": "hello", "max_tokens": 6, "stream": True}
    assert (await resumed_elsewhere(old, new, COMPLETIONS, alike)).status_code == 200


@pytest.mark.parametrize("padding", [0, 1 + long_work.LONG_BODY])
async def test_an_answer_that_moves_past_midnight_keeps_its_prompt(
    padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Templates write the date: that of the node to which the answer moved."""
    body = {"messages": MESSAGES, "max_tokens": 6, "stream": True, "metadata": {"a": "x" * padding}}
    template = "{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}"
    async with http_node(tokenizer=with_template(template)) as node:
        begun = (await ask(node, CHAT, body))[:3]
        before = last_prompt(node)
    tomorrow = time.time() + 86400
    monkeypatch.setattr(time, "time", lambda: tomorrow)
    async with http_node(tokenizer=with_template(template)) as node:
        await ask(node, CHAT, body, begun)
        assert last_prompt(node) == before
        await ask(node, CHAT, body)
        assert last_prompt(node) != before


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
async def test_an_answer_that_begins_at_midnight_moves(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Midnight lay between the template's reading of the clock and that of `created`, and the other
    node refused the prompt. A router has its own moment of a response that it keeps."""
    fields = {"max_tokens": 6} if path == CHAT else {"max_output_tokens": 6}
    body = {"messages" if path == CHAT else "input": MESSAGES, "stream": True, **fields}
    template = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }} {{ messages[0].content }}"
    clock = itertools.count(1_800_000_000, 86400)
    kept = {} if path == CHAT else {"x-tandem-response": KeptResponse("r", 1_700_000_000).header()}
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    monkeypatch.setattr(chat_template, "datetime", Ticking)
    async with http_node(tokenizer=with_template(template)) as node:
        begun = (await ask(node, path, body, **kept))[:3]
        before = last_prompt(node)
        await ask(node, path, body, begun, **kept)
        assert last_prompt(node) == before


def last_prompt(node: HttpNode) -> list[int]:
    *_, asked = node.engine.requests.values()
    return asked.request.spec.own_prompt_token_ids


class Ticking(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Ticking:
        return cls.fromtimestamp(time.time(), tz)


async def test_a_trace_goes_on_to_the_prefill_node() -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    async with http_node() as node:
        await node.client.post(COMPLETIONS, json={"prompt": [1], "max_tokens": 1}, headers=headers)
        assert node.engine.only.request.trace is not None
        assert node.engine.only.request.trace.trace_id == trace


def said(events: list[str]) -> tuple[str, list[int], list[float], list[str]]:
    """Returns text, tokens, log probabilities and ends of a streamed completion."""
    data = [line.removeprefix("data: ") for event in events for line in data_of(event).split("\n")]
    choices = [json.loads(line)["choices"][0] for line in data if line and line != "[DONE]"]
    return (
        "".join(choice["text"] for choice in choices),
        [token for choice in choices for token in choice.get("token_ids") or ()],
        [value for one in choices for value in (one["logprobs"] or {}).get("token_logprobs", ())],
        [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
    )


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}])
async def test_nodes_that_tell_several_tokens_at_once_continue_each_other(
    more: dict[str, Any],
) -> None:
    """As those do that speculate; each entry has as many tokens as came together."""
    body = {"prompt": [1, 2, 3], "max_tokens": 12, "seed": 5, "return_token_ids": True, **more}
    body["stream"] = True
    async with http_node() as one, http_node() as first, http_node() as second:
        first.engine.tokens_per_output, second.engine.tokens_per_output = 3, 4
        expected = said(await ask(one, COMPLETIONS, body))
        assert len(expected[1]) == 12 and expected[3] == ["length"]
        whole = await ask(first, COMPLETIONS, body)
        entries = re.findall(r'"tokens",0,\[(.*?)\]', "".join(whole))
        assert said(whole) == expected
        assert max(len(told.split(",")) for told in entries) >= 3
        for cut in range(1, len(whole)):
            rest = await ask(second, COMPLETIONS, body, whole[:cut])
            assert said([*whole[:cut], *rest]) == expected


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_the_last_event_tells_a_router_where_the_time_went(
    path: str, is_stream: bool
) -> None:
    body = {"prompt": "hello", "messages": MESSAGES, "max_tokens": 5, "stream": is_stream}
    del body["messages" if path == COMPLETIONS else "prompt"]
    async with http_node() as node:
        events = await ask(node, path, body)
        told = [line for event in events for line in event.split("\n") if line.startswith(":t ")]
        [times] = map(read_answer_times, map(str.encode, told))
        assert times is not None
        assert told[0] in events[-2], "the last one before [DONE]"
        assert times.prompt > 0
        assert times.tokens == 5
        assert 0 < times.first <= times.second <= times.total
        plain = await node.client.post(path, json=body)
        assert ":t " not in plain.text

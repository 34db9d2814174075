"""Trainers send token ids and get token ids, in the shapes of vLLM's /inference/v1/generate."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from decode_node.answer.logprobs import TokenNames, generate_logprobs
from decode_node.protocol.tokens.derender import GivenTokenLogprob
from decode_node.serving import prepare_choices
from edge.http.errors import BadRequest
from engine.contracts.outputs import TokenLogprobs
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from tests.decode_node.http_node import HttpNode, chunks_of, http_node

GENERATE = "/inference/v1/generate"
IDS = [5, 6, 7]
SAMPLING = {"max_tokens": 4, "seed": 3, "logprobs": 1}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODY: dict[str, Any] = {"model": "tiny", "token_ids": IDS, "sampling_params": SAMPLING}


async def post(node: HttpNode, **fields: Any) -> dict[str, Any]:
    response = await node.client.post(GENERATE, json={**BODY, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_tokens_are_those_of_a_completion() -> None:
    asked = {"prompt": IDS, **SAMPLING, "n": 2, "return_token_ids": True, "prompt_logprobs": 1}
    sampling = {**SAMPLING, "n": 2, "prompt_logprobs": 1}
    async with http_node() as node:
        theirs = (await node.client.post("/v1/completions", json=asked)).json()
        found = await post(node, sampling_params=sampling, return_token_ids=True)
        assert found["output_mode"] == "tokens" and found["request_id"]
        assert found["prompt_token_ids"] == IDS
        assert found["usage"] == theirs["usage"]
        for choice, other in zip(found["choices"], theirs["choices"], strict=True):
            assert "text" not in choice
            for name in ("index", "token_ids", "finish_reason", "stop_reason"):
                assert choice[name] == other[name]
            content = choice["logprobs"]["content"]
            assert [one["logprob"] for one in content] == other["logprobs"]["token_logprobs"]
            assert found["prompt_logprobs"] == other["prompt_logprobs"]


async def test_log_probabilities_name_tokens_by_id_in_both_ways_the_own_token_first() -> None:
    async with http_node() as node:
        (choice,) = (await post(node))["choices"]
        content = choice["logprobs"]["content"]
        assert [one["token_id"] for one in content] == choice["token_ids"]
        for one in content:
            first, second = one["top_logprobs"]
            assert first == {name: one[name] for name in ("token_id", "token", "logprob", "rank")}
            assert one["token"] == f"token_id:{one['token_id']}"
            assert (second["token"], second["rank"]) == ("token_id:1", 1)
        named = {**SAMPLING, "logprob_token_ids": [8, choice["token_ids"][0]]}
        (choice,) = (await post(node, sampling_params=named))["choices"]
        ranks = [
            [top["rank"] for top in one["top_logprobs"]] for one in choice["logprobs"]["content"]
        ]
        assert all(own == 1 and set(others) <= {None} for own, *others in ranks)


async def test_each_place_of_log_probabilities_is_encoded_by_itself() -> None:
    """One call for millions would hold the interpreter, and so all other answers, for seconds."""
    position = TokenLogprobs([5, 1], [-0.25, float("-inf")], 2)
    async with http_node() as node:
        names = TokenNames(node.tokenizer)
        found = generate_logprobs(names, [position] * 2, are_named=False, has_text=False)
    assert [type(one) for one in found.content] == [msgspec.Raw] * 2
    (own, other) = msgspec.json.decode(found.content[0])["top_logprobs"]
    assert (own["token_id"], own["rank"], other["logprob"]) == (5, 2, -9999.0)


@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_a_stream_tells_what_a_whole_answer_tells(mode: str) -> None:
    fields = {"output_mode": mode, "return_token_ids": True}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with http_node() as node:
        whole = await post(node, **fields)
        response = await node.client.post(GENERATE, json={**BODY, **fields, **options})
        *chunks, last = chunks_of(response.text)
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        assert [chunk.get("prompt_token_ids") for chunk in chunks] == [IDS, None, None, None]
        parts = [chunk["choices"][0] for chunk in chunks]
        (choice,) = whole["choices"]
        joined = [one for part in parts for one in part["logprobs"]["content"]]
        assert choice["logprobs"]["content"] == joined
        assert choice["token_ids"] == [i for part in parts for i in part["token_ids"]]
        assert [part["finish_reason"] for part in parts] == [None, None, None, "length"]
        if mode == "text":
            assert choice["text"] == "".join(part["text"] for part in parts) != ""
            texts = [bytes(one["bytes"]).decode("utf-8", "replace") for one in joined]
            assert texts == [one["token"] for one in joined]


async def test_the_token_that_ends_an_answer_is_told() -> None:
    async with http_node(scripts=["the dog"]) as node:
        script = node.engine.scripts[0]
        (choice,) = (await post(node, sampling_params={"logprobs": 0}))["choices"]
        assert choice["token_ids"] == script
        assert len(choice["logprobs"]["content"]) == len(script)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


async def test_nothing_is_drawn_by_the_models_own_defaults() -> None:
    """A trainer has to know the distribution that its tokens are from."""
    seen: list[SamplingParams] = []
    async with http_node(override_generation_config='{"top_k": 5, "max_new_tokens": 7}') as node:
        node.engine.on_generate = lambda fake: seen.append(fake.request.spec.sampling)
        await post(node, sampling_params={})
        await node.client.post("/v1/completions", json={"prompt": IDS})
    assert [(one.top_k, one.max_tokens) for one in seen] == [(0, 7), (5, 7)]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"token_ids": []}, "token_ids", "must not be empty"),
        ({"token_ids": [4000]}, "token_ids", "out of range"),
        ({"token_ids": [1] * 300}, "token_ids", "maximum context length"),
        ({"token_ids": "text"}, "token_ids", "must be a list"),
        ({"sampling_params": None}, "sampling_params", "must be an object"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature", "between"),
        ({"sampling_params": {"max_tokens": -1}}, "sampling_params.max_tokens", "at least 0, not"),
        ({"sampling_params": {"n": 0}}, "sampling_params.n", "must be 1 to 64"),
        ({"sampling_params": {"logprobs": -1}}, "sampling_params.logprobs", "between 0 and 20"),
        ({"sampling_params": {"extra_args": {"a": 1}}}, "sampling_params.extra_args", "extensions"),
        (
            {"sampling_params": {"guided_decoding": {"regex": "a"}}},
            "sampling_params.guided_decoding",
            "structured_outputs",
        ),
        (
            {"sampling_params": {"truncate_prompt_tokens": 2}},
            "sampling_params.truncate_prompt_tokens",
            "/v1/completions",
        ),
        ({"sampling_params": {"bad_words": ["a"] * 5000}}, "sampling_params.bad_words", "256"),
        (
            {"sampling_params": {"prompt_logprobs": 1}, "stream": True},
            "sampling_params.prompt_logprobs",
            "not part of a stream",
        ),
        ({"sampling_params": {"logit_bias": {str(i): 0 for i in range(3000)}}}, None, "2048 keys"),
        ({"output_mode": "derender"}, "output_mode", "/v1/chat/completions/derender"),
        ({"features": {"mm_hashes": {}}}, "features", "send images as content_parts"),
        (
            {"content_parts": [{"type": "image_url", "url": "data:image/png;base64,AAAA"}]},
            "content_parts.0",
            "takes no images here",
        ),
        ({"content_parts": [{"type": "image_url"}]}, "content_parts.0.url", "must be a string"),
        (
            {"content_parts": [{"type": "audio_url", "url": "x"}]},
            "content_parts.0.type",
            "must be image_url",
        ),
        ({"content_parts": ["x"]}, "content_parts.0", "must be an object"),
        ({"model": "other"}, "model", "does not exist"),
    ],
    ids=range(22),
)
async def test_refusals_name_the_field_as_the_client_wrote_it(
    fields: dict[str, Any], param: str | None, words: str
) -> None:
    async with http_node() as node:
        response = await node.client.post(GENERATE, json={**BODY, **fields})
        error = response.json()["error"]
        assert response.status_code == (404 if param == "model" else 400)
        assert error["param"] == param and words in error["message"]


async def test_what_trainers_send_besides_changes_nothing() -> None:
    besides = {"features": None, "kv_transfer_params": {"a": 1}, "cache_salt": "weights-3"}
    sampling = {**SAMPLING, "skip_special_tokens": False, "routed_experts_prompt_start": 2}
    async with http_node(strict_fields=True) as node:
        plain = await post(node)
        assert (await post(node, sampling_params=sampling, **besides))["choices"] == plain[
            "choices"
        ]


def plain(spec: RequestSpec) -> RequestSpec:
    """Returns it without the parentheses that chats have around a grammar."""
    grammar = spec.sampling.grammar.replace("(", "").replace(")", "")
    return spec.with_sampling(grammar=grammar)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5, "stop": ["dog"], "logprobs": True, "top_logprobs": 2, "n": 2},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
        {"guided_choice": ["the", "dog"], "max_completion_tokens": 3},
        {"regex": "[a-z]+", "tools": [], "priority": 2, "cache_salt": "s", "stream": True},
    ],
    ids=range(4),
)
async def test_a_rendered_chat_is_drawn_as_the_chat_itself(fields: dict[str, Any]) -> None:
    """The model's defaults are part of it, which do not count for tokens."""
    chat = {"messages": [{"role": "user", "content": "the dog"}], "seed": 5, **fields}
    chat = {"model": "tiny", "max_tokens": 4, **chat}
    async with http_node(override_generation_config='{"top_k": 7}') as node:
        response = await node.client.post("/v1/chat/completions/render", json=chat)
        body = response.json()
        assert response.status_code == 200, body
        assert not node.engine.requests
        specs = []
        for path, sent in (("/v1/chat/completions", chat), (GENERATE, body)):
            answer = await node.client.post(path, json=sent)
            assert answer.status_code == 200, answer.text
            specs.append([plain(fake.request.spec) for fake in node.engine.requests.values()])
            node.engine.forget_ended()
        assert specs[0] == specs[1]
        assert body["model"] == "tiny" and specs[0][0].sampling.top_k == 7


async def test_rendered_texts_are_a_list() -> None:
    async with http_node() as node:
        body = {"prompt": ["the", "dog"], "max_tokens": 4, "seed": 5}
        found = (await node.client.post("/v1/completions/render", json=body)).json()
        whole = await node.client.post("/v1/completions", json={**body, "return_token_ids": True})
        for rendered, choice in zip(found, whole.json()["choices"], strict=True):
            answer = await node.client.post(GENERATE, json=rendered)
            assert answer.json()["choices"][0]["token_ids"] == choice["token_ids"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions/render", {"prompt": "a", "echo": True}, "echo"),
        ("/v1/chat/completions/render", {"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ("/v1/chat/completions/render", {"max_tokens": 999}, "max_tokens"),
        ("/v1/chat/completions/render", {"model": "other"}, "model"),
    ],
    ids=range(4),
)
async def test_what_cannot_be_rendered_is_refused(
    path: str, fields: dict[str, Any], param: str
) -> None:
    async with http_node(strict_max_tokens=True, tool_call_parser="hermes") as node:
        chat = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {}
        response = await node.client.post(path, json={**chat, **fields})
        assert response.status_code in (400, 404)
        assert response.json()["error"]["param"] == param


VOLATILE = ("id", "created")


def lasting(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in VOLATILE}


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "logprobs": True},
        {"stop": ["dog"], "max_tokens": 9},
        {"stop_token_ids": [7], "max_tokens": 9},
        {"tools": [TOOL], "return_token_ids": True},
    ],
    ids=range(4),
)
async def test_a_chat_by_its_tokens_is_the_chat_itself(fields: dict[str, Any]) -> None:
    """Clients may lose what stopped an answer, and a token that has no text."""
    chat = {"messages": [{"role": "user", "content": "the dog"}], "seed": 5, **fields}
    chat = {"model": "tiny", "max_tokens": 4, **chat}
    path = "/v1/chat/completions"
    async with http_node(tool_call_parser="hermes") as node:
        whole = (await node.client.post(path, json=chat)).json()
        rendered = (await node.client.post(f"{path}/render", json=chat)).json()
        given = (await node.client.post(GENERATE, json=rendered)).json()
        num_asked = len(node.engine.requests)
        body = {"chat_request": chat, "generate_response": given}
        told = (await node.client.post(f"{path}/derender", json=body)).json()
        assert lasting(told) == lasting(whole)
        for choice in given["choices"]:
            del choice["stop_reason"]
            choice["token_ids"] = [one for one in choice["token_ids"] if one != 7]
        again = (await node.client.post(f"{path}/derender", json=body)).json()
        for choice, other in zip(again["choices"], whole["choices"], strict=True):
            assert choice["message"] == other["message"]
            assert choice["finish_reason"] == other["finish_reason"]
        assert len(node.engine.requests) == num_asked, "nothing is computed"


async def test_a_chat_is_rendered_in_the_shape_of_each_api() -> None:
    turns = [{"role": "user", "content": "the dog"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": turns, "max_tokens": 4, "stop": ["x"]},
        "/v1/messages": {"messages": turns, "max_tokens": 4, "stop_sequences": ["x"]},
        "/v1/responses": {"input": "the dog", "max_output_tokens": 4, "stop": ["x"]},
    }
    async with http_node() as node:
        found = []
        for path, body in bodies.items():
            told = (await node.client.post(f"{path}/render", json=body)).json()
            assert told.pop("request_id")
            found.append(told)
        assert not node.engine.requests, "nothing is computed"
        assert found[0] == found[1] == found[2] and found[0]["sampling_params"]["stop"] == ["x"]
        body = {**bodies["/v1/messages"], "stop_sequences": [""]}
        refused = (await node.client.post("/v1/messages/render", json=body)).json()
        assert refused["type"] == "error" and "stop_sequences" in refused["error"]["message"]
        body = {**bodies["/v1/responses"], "previous_response_id": "resp_1"}
        refused = (await node.client.post("/v1/responses/render", json=body)).json()
        assert refused["error"]["param"] == "previous_response_id"


@pytest.mark.parametrize("is_long", [False, True])
async def test_texts_by_their_tokens_are_the_texts(
    monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    """The texts of long answers are found beside the event loop."""
    monkeypatch.setattr(prepare_choices, "_LONG_ANSWER", 1 if is_long else 1 << 20)
    asked = {"prompt": ["the", "dog"], "max_tokens": 4, "n": 2, "seed": 5, "logprobs": 0}
    async with http_node() as node:
        whole = (await node.client.post("/v1/completions", json=asked)).json()
        rendered = (await node.client.post("/v1/completions/render", json=asked)).json()
        given = [(await node.client.post(GENERATE, json=one)).json() for one in rendered]
        body = {"completion_request": asked, "generate_responses": given, "prompt_tokens": [7, 8]}
        told = (await node.client.post("/v1/completions/derender", json=body)).json()
        assert told["choices"] == whole["choices"]
        assert told["usage"]["prompt_tokens"] == 15


MESSAGE = {"role": "user", "content": "a"}


@pytest.mark.parametrize("first", ["token_id:5", "token_id:6"])
def test_given_log_probabilities_are_those_of_the_engine(first: str) -> None:
    """The answer's own token is among those of the place, be it one of the most likely or not."""
    likely = [{"token": "token_id:5", "logprob": -0.5}, {"token_id": 7, "logprob": -1.5}]
    given = {"token": first, "logprob": -0.5 if first == "token_id:5" else -9.0, "rank": 3}
    given["top_logprobs"] = [*likely, *([given.copy()] if first == "token_id:6" else [])]
    place = GivenTokenLogprob.model_validate(given).at_its_place(2)
    own = int(first.removeprefix("token_id:"))
    assert place == TokenLogprobs([own, 5, 7], [given["logprob"], -0.5, -1.5], 3)
    nameless = GivenTokenLogprob.model_validate({"token": "dog", "logprob": -1.0})
    with pytest.raises(BadRequest, match="token_id"):
        nameless.at_its_place(2)


GIVEN = {"choices": [{"token_ids": [5], "finish_reason": "length"}]}


def _of_id(token_id: int) -> dict[str, Any]:
    """Returns an answer whose log probability names this token."""
    content = [{"token_id": token_id, "logprob": -1.0}]
    return {"choices": [{"token_ids": [5], "logprobs": {"content": content}}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"generate_response": {"choices": []}}, "generate_response.choices"),
        ({"generate_response": {"choices": [{"token_ids": [1 << 20]}]}}, "token_ids"),
        ({"generate_response": {"choices": [{"token_ids": [5] * 5000}]}}, "token_ids"),
        ({"generate_response": {"choices": GIVEN["choices"] * 65}}, "n"),
        (
            {"generate_response": {"choices": [{"token_ids": [5], "logprobs": {"content": [{}]}}]}},
            "generate_response.choices.0.logprobs.content.0.logprob",
        ),
        ({"chat_request": {"messages": [MESSAGE], "use_beam_search": True}}, "use_beam_search"),
        ({"model": "other"}, "model"),
        ({"prompt_tokens": -7}, "prompt_tokens"),
        ({"generate_response": _of_id(-1)}, "logprobs"),
        ({"generate_response": _of_id(1 << 40)}, "logprobs"),
    ],
    ids=range(11),
)
async def test_tokens_that_are_no_answer_are_refused(fields: dict[str, Any], param: str) -> None:
    body = {"chat_request": {"messages": [MESSAGE]}, "generate_response": GIVEN, **fields}
    async with http_node() as node:
        response = await node.client.post("/v1/chat/completions/derender", json=body)
        assert response.status_code in (400, 404), response.text
        assert response.json()["error"]["param"] == param

"""A conversation of /v1/responses is summed up in one item, which stands for it from then on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from decode_node.protocol.responses.compaction import REQUEST, SEAL
from decode_node.protocol.responses.responses import ResponsesRequest
from edge.http.errors import BadRequest
from tests.decode_node.http_node import HttpNode, http_node

URL = "/v1/responses"
SUMMARY = "They met at the harbour."
HELLO = {"role": "user", "content": "hello"}
TRIGGER = {"type": "compaction_trigger"}
SEALED = {"type": "compaction", "id": "cmp_1", "encrypted_content": SEAL + SUMMARY}
FORM = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def summing_node() -> Any:
    return http_node(scripts=[SUMMARY], context=1024)


async def post(node: HttpNode, **fields: Any) -> Any:
    response = await node.client.post(URL, json={"input": [HELLO, TRIGGER], **fields})
    assert response.status_code == 200, response.text
    return response


def contents_of(*items: dict[str, Any], **fields: Any) -> list[str]:
    chat = ResponsesRequest(input=list(items), **fields).to_chat()
    return [message.text for message in chat.messages]


async def test_a_trigger_asks_for_a_summary_which_is_the_only_item() -> None:
    async with summing_node() as node:
        whole = (await post(node)).json()
        (item,) = whole["output"]
        assert item == {"type": "compaction", "encrypted_content": SEAL + SUMMARY, "id": item["id"]}
        assert item["id"].startswith("cmp_") and whole["status"] == "completed"


async def test_a_stream_tells_of_the_summary_when_it_is_complete() -> None:
    async with summing_node() as node:
        lines = (await post(node, stream=True)).text.splitlines()
        events = [json.loads(one[6:]) for one in lines if one.startswith("data: ")]
        names = [one["type"].removeprefix("response.") for one in events]
        assert names == [
            "created", "in_progress", "output_item.added", "output_item.done", "completed"
        ]  # fmt: skip
        assert events[2]["item"]["encrypted_content"] == SEAL
        assert events[3]["item"]["encrypted_content"] == SEAL + SUMMARY
        assert events[4]["response"]["output"] == [events[3]["item"]]


async def test_compact_repeats_what_the_user_said_in_front_of_the_summary() -> None:
    answer = {"role": "assistant", "content": "Where?"}
    async with summing_node() as node:
        said = [HELLO, answer, {**HELLO, "id": "msg_1"}]
        response = await node.client.post(f"{URL}/compact", json={"model": "tiny", "input": said})
        assert response.status_code == 200, response.text
        found = response.json()
        first, second, item = found["output"]
        assert first == {
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_text", "text": "hello"}],
        }
        assert second["id"] == "msg_1"
        assert item["encrypted_content"] == SEAL + SUMMARY
        assert found["object"] == "response.compaction" and found["usage"]["output_tokens"] > 0
        again = await node.client.post(URL, json={"input": found["output"]})
        assert again.status_code == 200, again.text
        text = await node.client.post(f"{URL}/compact", json={"input": "hello"})
        assert text.json()["output"][0]["content"][0]["text"] == "hello"
        for fields, param in (
            ({"stream": True}, "stream"),
            ({"input": []}, "input"),
            ({"input": [{"role": "user"}]}, "input.0.content"),
            ({"input": None, "previous_response_id": "resp_1"}, "previous_response_id"),
        ):
            body = {"input": "hello", **fields}
            refused = await node.client.post(f"{URL}/compact", json=body)
            assert refused.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("script", "fields", "status"),
    [(SUMMARY, {"max_output_tokens": 5}, 400), ("", {}, 500)],
    ids=["cut off", "empty"],
)
async def test_compact_gives_no_half_of_a_summary(
    script: str, fields: dict[str, Any], status: int
) -> None:
    """Its body could not say so, and the client would forget the rest."""
    async with http_node(scripts=[script], context=1024) as node:
        response = await node.client.post(f"{URL}/compact", json={"input": "hello", **fields})
        assert response.status_code == status, response.text
        assert response.json()["error"]["param"] == next(iter(fields), None)


def test_the_model_is_asked_behind_all_that_was_said_in_no_form() -> None:
    request = ResponsesRequest(
        input=[HELLO, TRIGGER], text={"format": FORM}, tools=[TOOL], tool_choice="required"
    )
    chat = request.to_chat()
    assert [message.text for message in chat.messages] == ["hello", REQUEST]
    assert chat.response_format is None
    assert chat.tool_use().mode == "auto" and chat.tool_use().shown
    # A router that keeps responses sends the items of all before.
    assert contents_of(HELLO, TRIGGER, SEALED, HELLO)[0] == "hello"
    assert REQUEST not in contents_of(HELLO, TRIGGER, SEALED, HELLO)


def test_a_summary_stands_where_the_client_has_it() -> None:
    first, summary, last = contents_of(HELLO, SEALED, {**HELLO, "content": "go on"})
    assert (first, last) == ("hello", "go on")
    assert summary.endswith(f":\n\n{SUMMARY}")


def test_what_another_server_has_sealed_is_left_out_and_named() -> None:
    foreign = {"type": "compaction", "encrypted_content": "gAAAA"}
    assert contents_of(HELLO, foreign) == ["hello"]
    assert ResponsesRequest(input=[HELLO, foreign]).unknown_fields() == ["input.compaction"]
    assert ResponsesRequest(input=[HELLO, SEALED, TRIGGER]).unknown_fields() == []
    with pytest.raises(BadRequest) as refusal:
        contents_of(HELLO, {"type": "compaction"})
    assert refusal.value.param == "input.1.encrypted_content"

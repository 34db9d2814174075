"""A field of the wrong type is refused by its name, with what JSON belongs there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from decode_node.protocol.bodies.parse_body import validate
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.messages.messages import MessagesRequest
from decode_node.protocol.messages.messages_tools import MessageTools
from decode_node.protocol.responses.responses import ResponsesRequest
from edge.http.errors import BadRequest

USER = {"role": "user", "content": "hi"}


def said(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "messages", "is missing"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": None}, "messages", "must be a list, not null"),
        ({"messages": ["hi"]}, "messages.0", "must be an object, not a string"),
        ({"stop": 5}, "stop", "must be a string or a list, not an integer"),
        ({"stop": ["a", True]}, "stop.1", "must be a string, not true or false"),
        ({"max_tokens": 0.5}, "max_tokens", "must be an integer, not a number with a fraction"),
        ({"temperature": "hot"}, "temperature", "must be a number, not a string"),
        ({"stream": "yes"}, "stream", "must be true or false, not a string"),
        ({"stream_options": []}, "stream_options", "must be an object, not a list"),
        ({"logit_bias": {"7": {}}}, "logit_bias.7", "must be a number, not an object"),
        ({"logit_bias": {"Word": {}}}, "logit_bias.Word", "must be a number, not an object"),
        ({"early_stopping": 5}, "early_stopping", "must be true or false or 'never'"),
        ({"cache_salt": "x" * 513}, "cache_salt", "must have at most 512 characters"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "must be 'text', 'json_object', 'json_schema' or 'structural_tag'",
        ),
        (
            said({"type": "image_url", "image_url": 5}),
            "messages.0.content.0.image_url",
            "must be an object or a string, not an integer",
        ),
        (
            said({"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}),
            "messages.0.content.1",
            "must have a type of text, image_url or video_url; nothing else is read",
        ),
    ],
    ids=range(17),
)
def test_the_message_names_the_place_and_what_json_belongs_there(
    body: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        validate({"messages": [USER], **body} if body else {}, ChatCompletionRequest)
    assert (caught.value.param, caught.value.message) == (param, f"{param} {message}")


@pytest.mark.parametrize("wrong", [["message"], {"a": 1}, 5, True])
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (
            ResponsesRequest,
            lambda wrong: {"input": [{"type": wrong, "role": "user", "content": "a"}]},
        ),
        (
            ResponsesRequest,
            lambda wrong: {"input": [{"role": "user", "content": [{"type": wrong, "text": "a"}]}]},
        ),
        (
            MessagesRequest,
            lambda wrong: {
                "messages": [{"role": "user", "content": [{"type": wrong, "text": "a"}]}]
            },
        ),
    ],
)
def test_names_of_types_that_are_no_texts(
    kind: type[Any], body: Callable[[Any], dict[str, Any]], wrong: Any
) -> None:
    with pytest.raises(BadRequest) as caught:
        validate({"max_tokens": 4, **body(wrong)}, kind).to_chat()
    assert caught.value.param


@pytest.mark.parametrize("wrong", [["a"], {"a": 1}])
def test_a_deferred_tool_whose_name_is_no_text_is_there_to_be_refused(wrong: Any) -> None:
    tool = {"name": wrong, "input_schema": {}, "defer_loading": True}
    found = MessageTools.of([tool], [USER])
    assert [one["function"]["name"] for one in found.functions] == [wrong]

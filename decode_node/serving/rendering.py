"""Renders requests for text as requests for tokens, which any node would answer in the same way."""

from __future__ import annotations

from typing import Any

from decode_node.grammar.structured_output import find_constraint
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.tokens.rendered import Rendered, sampling_params
from decode_node.serving.read_request import ReadRequest
from edge.http.errors import BadRequest


def rendered(read: ReadRequest) -> list[Rendered]:
    """Returns one request for tokens for each prompt. Raises `BadRequest` for what tokens alone do
    not say."""
    body, served = read.body, read.model.served
    if read.images.pixels:
        message = "images are not rendered; send them to /v1/chat/completions"
        raise BadRequest(message, param="messages", code="unsupported_parameter")
    sampling = sampling_params(body, served.defaults, _structured(read))
    options = body.stream_options if body.stream else None
    several = len(read.prompts) > 1
    return [
        Rendered(
            request_id=f"{read.form.id}-{i}" if several else read.form.id,
            token_ids=prompt.token_ids,
            sampling_params=sampling,
            model=read.model.name,
            stream=bool(body.stream),
            stream_options=None if options is None else options.model_dump(exclude_none=True),
            cache_salt=body.cache_salt,
            priority=body.priority or 0,
        )
        for i, prompt in enumerate(read.prompts)
    ]


def _structured(read: ReadRequest) -> dict[str, Any] | None:
    """Returns the form of the answers. Raises `BadRequest` for calls, whose form depends on the
    model."""
    body = read.body
    if isinstance(body, ChatCompletionRequest) and read.prompts[0].grammar:
        use = body.tool_use()
        if use.must_call or any(tool.strict for tool in use.tools if use.may_call):
            message = "tools that are strict or must be called are not rendered; leave that out"
            raise BadRequest(message, param="tools", code="unsupported_parameter")
    constraint = find_constraint(body)
    if constraint is None:
        return None
    found = {constraint.kind: constraint.value, "whitespace_pattern": constraint.white_space}
    return {name: value for name, value in found.items() if value is not None}

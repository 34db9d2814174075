"""Anthropic's client against /v1/messages: answers, streams, calls and their results, counts."""

from __future__ import annotations

import sys

import anthropic

CHAT = [{"role": "user", "content": "Tell me a story about Ada."}]
TOOL = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def check(client: anthropic.Anthropic) -> None:
    [model] = client.models.list()
    assert (model.id, model.type, model.display_name) == ("demo", "model", "demo")
    assert model.lifecycle == "active"
    assert client.models.retrieve("demo").max_input_tokens == model.max_input_tokens > 0
    short = {"model": "demo", "max_tokens": 20, "extra_body": {"temperature": 0.0}}
    long = {**short, "max_tokens": 900}
    whole = client.messages.create(messages=CHAT, system="Be brief.", **short)
    with client.messages.stream(messages=CHAT, system="Be brief.", **short) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
    count = client.messages.count_tokens(model="demo", messages=CHAT, system="Be brief.")
    usage = whole.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    choice = {"type": "tool", "name": "weather"}
    asked = client.messages.create(messages=CHAT, tools=[TOOL], tool_choice=choice, **long)
    assert asked.stop_reason == "tool_use"
    [call] = [block for block in asked.content if block.type == "tool_use"]
    assert call.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is warm."}
    history = [
        *CHAT,
        {"role": "assistant", "content": [block.model_dump() for block in asked.content]},
        {"role": "user", "content": [result]},
    ]
    last = client.messages.create(
        messages=history, tools=[TOOL], tool_choice={"type": "none"}, **short
    )
    assert last.content[0].text
    try:
        client.messages.create(messages=CHAT, model="no-such-model", max_tokens=5)
    except anthropic.NotFoundError:
        return
    raise AssertionError("no error for an unknown model")


if __name__ == "__main__":
    with anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0) as used:
        check(used)

"""The official client: answers, streams, schemas, calls, and both of its APIs."""

from __future__ import annotations

import sys
from typing import Literal

import openai
from pydantic import BaseModel

CHAT = [{"role": "user", "content": "Tell me a story about Ada."}]
LONG = {"model": "demo", "max_tokens": 900, "temperature": 0}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    is_warm: bool


def answers(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    whole = client.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=30, temperature=0, logprobs=True, top_logprobs=2
    )
    choice = whole.choices[0]
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    stream = client.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=30, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert text == choice.message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    several = client.completions.create(
        model="demo", prompt="Ada", n=2, max_tokens=5, extra_body={"unknown_to_all": 1}
    )
    assert [c.index for c in several.choices] == [0, 1]


def schemas_and_calls(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(messages=CHAT, response_format=Weather, **LONG)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    tool = openai.pydantic_function_tool(Weather)
    whole = client.chat.completions.create(
        messages=CHAT, tools=[tool], tool_choice="required", parallel_tool_calls=False, **LONG
    )
    assert whole.choices[0].finish_reason == "tool_calls"
    [call] = whole.choices[0].message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(
        messages=CHAT, tools=[tool], tool_choice="required", parallel_tool_calls=False, **LONG
    ) as stream:
        final = stream.get_final_completion()
    [streamed] = final.choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    history = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "It is warm."},
    ]
    last = client.chat.completions.create(
        model="demo", messages=history, tools=[tool], tool_choice="none", max_tokens=20
    )
    assert last.choices[0].message.content and not last.choices[0].message.tool_calls


def responses(client: openai.OpenAI) -> None:
    whole = client.responses.create(
        model="demo", input="Hello", max_output_tokens=20, temperature=0, store=False
    )
    assert whole.output_text
    with client.responses.stream(
        model="demo", input="Hello", max_output_tokens=20, temperature=0, store=False
    ) as stream:
        assert stream.get_final_response().output_text == whole.output_text
    parsed = client.responses.parse(
        model="demo", input="Hello", text_format=Weather, max_output_tokens=900, temperature=0,
        store=False,
    )  # fmt: skip
    assert isinstance(parsed.output_parsed, Weather)


def decisions(client: openai.OpenAI) -> None:
    places = [{"value": "harbour", "description": "by the sea"}, {"value": False}]
    levels = [{"label": name} for name in ("low", "middle", "high")]
    found = client.decisions.create(
        model="demo",
        input="The boat is in the harbour.",
        questions=[
            {"type": "predicate", "instructions": "It floats."},
            {"type": "choice", "name": "place", "instructions": "Where is it?", "choices": places},
            {"type": "score", "instructions": "How is the tide?", "levels": levels},
        ],
    )
    predicate, choice, score = found.answers
    assert predicate.type == "predicate" and 0 <= predicate.probability <= 1
    assert choice.name == "place" and choice.choice in ("harbour", False)
    assert score.type == "score" and 0 <= score.score <= 2
    for answer in (choice, score):
        assert abs(sum(one.probability for one in answer.probabilities) - 1) < 1e-6
    assert found.usage.output_tokens == 3


def summaries(client: openai.OpenAI) -> None:
    compacted = client.responses.compact(model="demo", input="Tell me about Ada.")
    said, summary = compacted.output
    assert said.type == "message" and summary.type == "compaction"
    again = [*(one.to_dict() for one in compacted.output), {"role": "user", "content": "Go on."}]
    assert client.responses.create(model="demo", input=again, max_output_tokens=20).output_text


def errors(client: openai.OpenAI) -> None:
    for kind, fields in (
        (openai.NotFoundError, {"model": "no-such-model"}),
        (openai.BadRequestError, {"model": "demo", "temperature": -1}),
    ):
        try:
            client.chat.completions.create(messages=CHAT, **fields)
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__} for {fields}")


if __name__ == "__main__":
    with openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0) as used:
        for part in (answers, schemas_and_calls, responses, errors):
            part(used)
        if hasattr(used, "decisions"):  # From 3.57 on.
            decisions(used)
            summaries(used)

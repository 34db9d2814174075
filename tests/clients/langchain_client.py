"""LangChain: messages, streams, `with_structured_output` in each of its ways, `bind_tools`."""

from __future__ import annotations

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    """The weather of a city."""

    # The demo model finds no end of an object that may have more keys.
    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    is_warm: bool


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Tells the weather of a city."""
    return f"It is warm in {city}."


def check(url: str) -> None:
    common = {"model": "demo", "base_url": f"{url}/v1", "api_key": "none", "temperature": 0}
    chat = ChatOpenAI(**common, max_tokens=900, max_retries=0)
    short = ChatOpenAI(**common, max_tokens=20, max_retries=0)
    whole = short.invoke("Tell me a story about Ada.")
    assert whole.content and whole.usage_metadata["output_tokens"] > 0
    streamed = "".join(chunk.content for chunk in short.stream("Tell me a story about Ada."))
    assert streamed == whole.content
    assert OpenAI(**common, max_tokens=5).invoke("Ada")
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(Weather, method=method).invoke("Paris?")
        assert isinstance(found, Weather), method
    question = HumanMessage("Paris?")
    asked = chat.bind_tools([weather], tool_choice="required", strict=True).invoke([question])
    call = asked.tool_calls[0]
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert short.bind_tools([weather], tool_choice="none").invoke([question, asked, result]).content


if __name__ == "__main__":
    check(sys.argv[1])

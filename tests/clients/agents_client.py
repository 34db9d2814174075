"""OpenAI's Agents SDK: a typed answer, and a loop that calls a tool, over both APIs."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

CALLS: list[str] = []


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    is_warm: bool


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Tells the weather of a city."""
    CALLS.append(city)
    return f"It is warm in {city}."


async def check(url: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    settings = ModelSettings(temperature=0.0, max_tokens=900, store=False)
    once = ModelSettings(temperature=0.0, max_tokens=900, store=False, tool_choice="required")
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="demo", openai_client=client)
        typed = Agent(name="typed", model=model, model_settings=settings, output_type=Weather)
        found = await Runner.run(typed, "Paris?")
        assert isinstance(found.final_output, Weather), kind
        CALLS.clear()
        # The required choice is lifted once a tool was called: then the model answers.
        caller = Agent(name="caller", model=model, model_settings=once, tools=[weather])
        said = await Runner.run(caller, "Paris?")
        assert CALLS and isinstance(said.final_output, str), kind


if __name__ == "__main__":
    asyncio.run(check(sys.argv[1]))

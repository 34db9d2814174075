"""Pydantic AI: text, streams, objects through tools and natively, and an agent with a tool."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    is_warm: bool


async def check(url: str) -> None:
    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    settings = {"temperature": 0.0, "max_tokens": 900}
    short = {"temperature": 0.0, "max_tokens": 20}
    plain = Agent(model, instructions="Be brief.")
    whole = await plain.run("Tell me a story about Ada.", model_settings=short)
    async with plain.run_stream("Tell me a story about Ada.", model_settings=short) as stream:
        assert await stream.get_output() == whole.output
    for kind in (Weather, NativeOutput(Weather)):
        found = await Agent(model, output_type=kind).run("Paris?", model_settings=settings)
        assert isinstance(found.output, Weather), kind


if __name__ == "__main__":
    asyncio.run(check(sys.argv[1]))

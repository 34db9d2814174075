"""Instructor, which asks for objects in tools and in JSON."""

from __future__ import annotations

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict

CHAT = [{"role": "user", "content": "What is the weather?"}]


class Weather(BaseModel):
    """The weather of a city."""

    # The demo model finds no end of an object that may have more keys.
    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    is_warm: bool


def check(url: str) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        client = instructor.from_openai(plain, mode=mode)
        found = client.chat.completions.create(
            model="demo", messages=CHAT, response_model=Weather, max_tokens=900, temperature=0,
            max_retries=0,
        )  # fmt: skip
        assert isinstance(found, Weather), mode


if __name__ == "__main__":
    check(sys.argv[1])

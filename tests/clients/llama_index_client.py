"""LlamaIndex, by its class for servers of OpenAI's API: answers, streams, typed answers."""

from __future__ import annotations

import sys
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    is_warm: bool


def check(url: str) -> None:
    common = {"model": "demo", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0.0}
    common |= {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0}
    short = OpenAILike(**common, max_tokens=20)
    question = [ChatMessage(role="user", content="Tell me a story about Ada.")]
    whole = short.chat(question).message.content
    assert whole
    assert [chunk.message.content for chunk in short.stream_chat(question)][-1] == whole
    found = OpenAILike(**common, max_tokens=900).as_structured_llm(Weather).chat(question)
    assert isinstance(found.raw, Weather)


if __name__ == "__main__":
    check(sys.argv[1])

"""LiteLLM, by its names for servers of OpenAI's API and of vLLM."""

from __future__ import annotations

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Else it asks the internet at import.
import litellm

CHAT = [{"role": "user", "content": "Tell me a story about Ada."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def check(model: str, url: str) -> None:
    common = {"model": model, "api_base": f"{url}/v1", "api_key": "none", "messages": CHAT}
    common |= {"temperature": 0, "num_retries": 0}
    whole = litellm.completion(**common, max_tokens=20)
    chunks = list(litellm.completion(**common, max_tokens=20, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
    answer = litellm.completion(**common, max_tokens=900, response_format=form)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")
    if model.startswith("hosted_vllm"):
        # It takes additionalProperties out of tools, so that this model would never come to an end.
        return
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    called = litellm.completion(**common, max_tokens=900, tools=[tool], tool_choice="required")
    call = called.choices[0].message.tool_calls[0]
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


if __name__ == "__main__":
    for name in ("openai/demo", "hosted_vllm/demo"):
        check(name, sys.argv[1])

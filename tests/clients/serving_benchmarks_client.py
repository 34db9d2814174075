"""Asks as the serving benchmarks of vLLM and SGLang ask, and reads answers as they do.

The packages need a GPU's libraries or hundreds of megabytes, so this is not their code. It sends
the fields of `vllm bench serve` (0.33) and `sglang.benchmark.serving` (0.5.23), and reads so:

    vLLM    takes whatever bytes have arrived and needs whole events in them; each has choices or
            usage; the last one tells how many tokens there were
    SGLang  reads line by line; each line that is not empty is JSON behind `data: `, no comment;
            asks for no usage and takes `choices[0]` of every event; of its own API, its default, it
            takes all of an answer's text and the number of its tokens from every event
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import aiohttp

TOKENS = 6
TEXTS = [{"type": "text", "text": "Tell me a story about Ada."}]
CHAT = [{"role": "user", "content": "Tell me a story about Ada."}]
VLLM = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
SGLANG = {"temperature": 0.0, "ignore_eos": True}
SGLANG_TEXT = {**SGLANG, "best_of": 1, "max_tokens": TOKENS}


async def vllm(session: aiohttp.ClientSession, path: str, fields: dict[str, Any]) -> None:
    headers = {"x-request-id": f"benchmark{path.replace('/', '-')}"}
    body, events, usage = {"model": "demo", **VLLM, **fields}, 0, {}
    async with session.post(path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["x-request-id"] == headers["x-request-id"]
        rest = b""
        async for chunk in response.content.iter_any():
            *whole, rest = (rest + chunk).split(b"\n\n")
            for event in whole:
                if event != b"data: [DONE]":
                    data = json.loads(event.removeprefix(b"data: "))
                    events += bool(data["choices"])
                    usage = usage if data["choices"] else data["usage"]
    # Tokens may share an event; the role and the end may have one of their own.
    assert not rest and 0 < events <= TOKENS + 2, (path, events)
    assert usage["completion_tokens"] == TOKENS, (path, usage)
    assert usage["prompt_tokens"] > 0


async def sglang(session: aiohttp.ClientSession, path: str, fields: dict[str, Any]) -> None:
    body, text = {"model": "demo", **SGLANG, **fields}, ""
    is_chat = path.endswith("chat/completions")
    async with session.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            data = line.strip().decode().removeprefix("data: ")
            if data and data != "[DONE]":
                choice = json.loads(data)["choices"][0]
                text += (choice["delta"].get("content") or "") if is_chat else choice["text"]
    async with session.post(path, json={**body, "stream": False}) as response:
        whole = await response.json()
    choice = whole["choices"][0]
    assert text == (choice["message"]["content"] if is_chat else choice["text"]), path
    assert whole["usage"]["completion_tokens"] == TOKENS


async def sglang_native(session: aiohttp.ClientSession, prompt: dict[str, Any]) -> None:
    sampling = {**SGLANG, "max_new_tokens": TOKENS}
    fields = {"lora_path": None, "return_logprob": False, "return_routed_experts": False}
    body = {**prompt, "sampling_params": sampling, "logprob_start_len": -1, **fields}
    text, counts = "", []
    async with session.post("/generate", json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            data = line.strip().removeprefix(b"data: ")
            if data and data != b"[DONE]":
                event = json.loads(data)
                text, counts = event["text"], [*counts, event["meta_info"]["completion_tokens"]]
    async with session.post("/generate", json={**body, "stream": False}) as response:
        whole = await response.json()
    assert (text, counts[-1]) == (whole["text"], TOKENS), prompt
    assert counts == sorted(counts) and whole["meta_info"]["prompt_tokens"] > 0


async def vllm_responses(session: aiohttp.ClientSession) -> None:
    body = {"model": "demo", "input": CHAT, "max_output_tokens": TOKENS, "stream": True}
    async with session.post("/v1/responses", json={**body, "store": False}) as response:
        lines = (await response.text()).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert any(event["type"] == "response.output_text.delta" for event in events)
    assert events[-1]["response"]["usage"]["output_tokens"] > 0


async def check(url: str) -> None:
    async with aiohttp.ClientSession(url) as session:
        async with session.get("/v1/models") as response:
            card = (await response.json())["data"][0]
        assert card["id"] == "demo" and card["root"]
        completion = {"repetition_penalty": 1.0, "max_tokens": TOKENS, "logprobs": None}
        for prompt in ("Ada was", [5, 6, 7], ["Ada was"]):
            await vllm(session, "/v1/completions", {**completion, "prompt": prompt})
        for content in (CHAT[0]["content"], TEXTS):
            messages = [{"role": "user", "content": content}]
            chat = {"messages": messages, "max_completion_tokens": TOKENS}
            await vllm(session, "/v1/chat/completions", chat)
            await sglang(session, "/v1/chat/completions", chat)
        for prompt in ("Ada was", [5, 6, 7]):
            await sglang(session, "/v1/completions", {**SGLANG_TEXT, "prompt": prompt})
        await sglang(session, "/v1/completions", {**SGLANG_TEXT, "prompt": "Ada", "logprobs": 2})
        for prompt in ({"text": "Ada was"}, {"input_ids": [5, 6, 7]}):
            await sglang_native(session, prompt)
        await vllm_responses(session)


if __name__ == "__main__":
    asyncio.run(check(sys.argv[1]))

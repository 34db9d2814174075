"""Images through router, decode and prefill nodes: the answers are those of transformers, on a cold
and on a warm prefill node, and behind the death of a decode node. Decode nodes have no encoder."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from decode_node.images.preprocess import preprocess
from decode_node.images.videos.preprocess import preprocess_video
from engine.models.checkpoint import load_model_config
from tests.decode_node.images.test_preprocess import encode, picture
from tests.e2e.conftest import Cluster, _Clusters
from tests.e2e.vision_node_checkpoint import save
from tests.engine.images.video_prompts import Clip, video_prompt
from tests.engine.images.video_prompts import reference_greedy as reference_of_video
from tests.engine.images.vision_checkpoints import (
    END,
    IMAGE,
    START,
    Picture,
    Prompt,
    reference_greedy,
)

COUNT = 24
NUM_ENCODED = 2 * 5 * 4 + 11
"""Tokens of the three images that questions have, each encoded once."""


@dataclass(frozen=True)
class Question:
    """A request's parts, and what transformers answers."""

    content: list[dict[str, Any]]
    num_prompt_tokens: int
    answer: list[int]

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": "demo",
            "messages": [{"role": "user", "content": self.content}],
            "max_tokens": COUNT,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }


def question(folder: Path, images: list[Image.Image], form: str = "PNG") -> Question:
    pixels = load_model_config(folder).vision.pixels  # type: ignore[union-attr]
    content: list[dict[str, Any]] = [{"type": "text", "text": "w5 w6 w7"}]
    tokens, pictures = [5, 6, 7], []
    for index, image in enumerate(images):
        data = encode(image, form)
        found = preprocess(data, pixels, 10_000_000)
        patches = np.frombuffer(found.patches, np.uint8).reshape(-1, 3, 14, 14)
        pictures.append(Picture(found.rows, found.columns, patches))
        tokens += [START, *[IMAGE] * (found.rows * found.columns), END, 20 + index, 21 + index]
        url = f"data:image/{form.lower()};base64,{base64.b64encode(data).decode()}"
        content.append({"type": "image_url", "image_url": {"url": url, "detail": "high"}})
        content.append({"type": "text", "text": f"w{20 + index} w{21 + index}"})
    asked = Prompt(tokens, pictures)
    return Question(content, len(tokens), reference_greedy(folder, "qwen2_5", asked, COUNT))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def questions(checkpoint: Path) -> list[Question]:
    first, other, wide = picture(150, 110, 1), picture(150, 110, 2), picture(300, 40, 3)
    asked = [[], [first], [other], [first, wide, first]]
    return [question(checkpoint, images) for images in asked]


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def cluster(checkpoint: Path) -> AsyncIterator[Cluster]:
    clusters = _Clusters(checkpoint)
    limits = ["--num-blocks", "128"]
    prefill_args = [*limits, "--max-num-batched-tokens", "48", "--encoder-budget", "54"]
    yield await clusters.start(1, 2, prefill_args=prefill_args, decode_args=limits)
    await clusters.stop()


async def ask(
    url: str, body: dict[str, Any], path: str = "/v1/chat/completions"
) -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}{path}", json=body) as response,
    ):
        return response.status, await response.json()


def for_responses(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "input_text", "text": part["text"]}
    return {"type": "input_image", "detail": "auto", "image_url": part["image_url"]["url"]}


def for_messages(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    media, _, data = part["image_url"]["url"].partition(";base64,")
    source = {"type": "base64", "media_type": media.removeprefix("data:"), "data": data}
    return {"type": "image", "source": source}


@pytest.mark.e2e
async def test_answers_are_those_of_transformers(
    cluster: Cluster, questions: list[Question]
) -> None:
    for _ in range(2):
        for asked in questions:
            status, answer = await ask(cluster.url, asked.body)
            assert status == 200, answer
            assert answer["choices"][0]["token_ids"] == asked.answer
            assert answer["usage"]["prompt_tokens"] == asked.num_prompt_tokens
    url = cluster.prefills[0].metrics_url
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        told = await response.text()
    assert _value(told, "tandem_image_tokens_total") == NUM_ENCODED
    assert _value(told, "vllm:mm_cache_hits_total") > 0
    await cluster.wait_empty()


@pytest.mark.e2e
async def test_answers_about_videos_are_those_of_transformers(
    cluster: Cluster, checkpoint: Path
) -> None:
    """Two seconds in four frames: two pairs, with positions in time and no text between them."""
    vision = load_model_config(checkpoint).vision
    assert vision is not None and vision.video is not None
    frames = [picture(150, 110, seed) for seed in range(4)]
    data = encode(frames[0], "PNG", save_all=True, append_images=frames[1:], duration=500)
    made = preprocess_video([data], vision.pixels, vision.video, 10_000_000)
    rows, columns = made.pairs[0].rows, made.pairs[0].columns
    pairs = [np.frombuffer(pair.patches, np.uint8).reshape(-1, 3, 2, 14, 14) for pair in made.pairs]
    tick = vision.video.ticks_per_second * made.step_s
    asked = video_prompt("qwen2_5", [Clip(pairs, rows, columns, tick)], 7)
    start = asked.tokens.index(START)
    url = f"data:image/apng;base64,{base64.b64encode(data).decode()}"
    end = start + 2 + sum(span.num_tokens for span in asked.spans)
    content = [
        {"type": "text", "text": " ".join(f"w{token}" for token in asked.tokens[:start])},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "text", "text": " ".join(f"w{token}" for token in asked.tokens[end:])},
    ]
    expected = reference_of_video(checkpoint, "qwen2_5", asked, COUNT)
    for _ in range(2):
        status, answer = await ask(cluster.url, Question(content, 0, []).body)
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == expected
        assert answer["usage"]["prompt_tokens"] == len(asked.tokens)
    await cluster.wait_empty()


@pytest.mark.e2e
async def test_all_apis_see_the_same(cluster: Cluster, questions: list[Question]) -> None:
    asked = questions[3]
    same = {"temperature": 0.0, "model": "demo"}
    limit = {**same, "max_tokens": COUNT}
    _, chat = await ask(cluster.url, {**limit, **messages_of(asked.content)})
    text = chat["choices"][0]["message"]["content"]
    items = messages_of([for_responses(part) for part in asked.content])["messages"]
    turns = messages_of([for_messages(part) for part in asked.content])
    status, answer = await ask(
        cluster.url, {**same, "max_output_tokens": COUNT, "input": items}, "/v1/responses"
    )
    assert status == 200, answer
    assert answer["output"][0]["content"][0]["text"] == text
    assert answer["usage"]["input_tokens"] == asked.num_prompt_tokens
    status, answer = await ask(cluster.url, {**limit, **turns}, "/v1/messages")
    assert status == 200, answer
    assert answer["content"][0]["text"] == text
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == asked.num_prompt_tokens
    counted = await ask(cluster.url, {"model": "demo", **turns}, "/v1/messages/count_tokens")
    assert counted == (200, {"input_tokens": asked.num_prompt_tokens})
    _, tokens = await ask(cluster.url, messages_of(asked.content), "/tokenize")
    assert tokens["count"] == asked.num_prompt_tokens


def messages_of(content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.e2e
async def test_a_decode_node_alone_says_that_it_has_no_encoder(
    cluster: Cluster, questions: list[Question]
) -> None:
    node = cluster.decodes[0].url
    status, answer = await ask(node, questions[1].body)
    assert (status, answer["error"]["code"]) == (503, "no_image_encoder")
    assert "--image-encoder" in answer["error"]["message"]
    status, answer = await ask(node, questions[0].body)
    assert status == 200 and answer["choices"][0]["token_ids"] == questions[0].answer


@pytest.mark.e2e
async def test_tokens_with_placeholders_get_their_images_as_in_sglang(
    cluster: Cluster, questions: list[Question]
) -> None:
    for asked in questions:
        parts = [part["image_url"]["url"] for part in asked.content if part["type"] != "text"]
        ids = [5, 6, 7]
        for index in range(len(parts)):
            ids += [START, IMAGE, END, 20 + index, 21 + index]
        sampling = {"max_new_tokens": COUNT, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling}
        for data in (parts, [part.partition(",")[2] for part in parts]):
            status, answer = await ask(cluster.url, {**body, "image_data": data}, "/generate")
            assert status == 200, answer
            assert answer["output_ids"] == asked.answer
            assert answer["meta_info"]["prompt_tokens"] == asked.num_prompt_tokens
    status, answer = await ask(cluster.url, {**body, "image_data": parts[:1]}, "/generate")
    assert (status, answer["error"]["param"]) == (400, "image_data")


@pytest.mark.e2e
async def test_tokens_with_placeholders_get_their_images_as_in_vllm(
    cluster: Cluster, questions: list[Question]
) -> None:
    path = "/inference/v1/generate"
    for asked in questions:
        urls = [part["image_url"]["url"] for part in asked.content if part["type"] != "text"]
        ids = [5, 6, 7]
        for index in range(len(urls)):
            ids += [START, IMAGE, END, 20 + index, 21 + index]
        sampling = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True}
        parts = [{"type": "image_url", "url": url} for url in urls]
        body = {"token_ids": ids, "sampling_params": sampling, "return_token_ids": True}
        status, answer = await ask(cluster.url, {**body, "content_parts": parts}, path)
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == asked.answer
        prompt = answer["prompt_token_ids"]
        assert len(prompt) == asked.num_prompt_tokens
        images = answer["mm_placeholders"]["image"] if urls else []
        assert len(images) == prompt.count(START) == len(urls)
        for one in images:
            begin, end = one["offset"], one["offset"] + one["length"]
            assert set(prompt[begin:end]) == {IMAGE}
            assert (prompt[begin - 1], prompt[end]) == (START, END)
        assert ("mm_placeholders" in answer) is bool(urls)
    status, answer = await ask(cluster.url, {**body, "content_parts": parts[:1]}, path)
    assert (status, answer["error"]["param"]) == (400, "content_parts")


@pytest.mark.e2e
async def test_a_chat_with_images_is_rendered_with_them(
    cluster: Cluster, questions: list[Question]
) -> None:
    """The tokens have one placeholder for each, and go where trainers send them."""
    path = "/v1/chat/completions"
    for asked in questions:
        status, rendered = await ask(cluster.url, asked.body, f"{path}/render")
        assert status == 200, rendered
        num_images = sum(part["type"] == "image_url" for part in asked.content)
        assert rendered["token_ids"].count(IMAGE) == num_images
        assert len(rendered.get("content_parts", [])) == num_images
        status, given = await ask(cluster.url, rendered, "/inference/v1/generate")
        assert status == 200, given
        assert given["choices"][0]["token_ids"] == asked.answer
        body = {"chat_request": asked.body, "generate_response": given}
        status, told = await ask(cluster.url, body, f"{path}/derender")
        assert status == 200, told
        assert told["choices"][0]["token_ids"] == asked.answer
        assert told["usage"]["prompt_tokens"] == asked.num_prompt_tokens
    body = {**asked.body, "mm_processor_kwargs": {"max_pixels": 3136}}
    status, answer = await ask(cluster.url, body, f"{path}/render")
    assert (status, answer["error"]["param"]) == (400, "mm_processor_kwargs")


@pytest.mark.e2e
async def test_a_wrong_image_is_told_by_its_part(
    cluster: Cluster, questions: list[Question]
) -> None:
    body = json.loads(json.dumps(questions[1].body))
    body["messages"][0]["content"][1]["image_url"]["url"] = "data:image/png;base64,AAAA"
    status, answer = await ask(cluster.url, body)
    assert (status, answer["error"]["param"]) == (400, "messages.0.content.1")


@pytest.mark.e2e
async def test_an_answer_goes_on_when_its_decode_node_dies(
    cluster: Cluster, questions: list[Question]
) -> None:
    """The router sends the image again, from the body that it holds."""
    body = {**questions[3].body, "max_tokens": 300}
    status, undisturbed = await ask(cluster.url, body)
    assert status == 200
    expected = undisturbed["choices"][0]["token_ids"]
    assert expected[:COUNT] == questions[3].answer
    async with asyncio.timeout(100), aiohttp.ClientSession() as session:
        killed: list[int] = []
        while not killed:
            found, killed = await _answer_of_the_killed(session, cluster, {**body, "stream": True})
            assert found == expected
    assert len(killed) == 1


async def _answer_of_the_killed(
    session: aiohttp.ClientSession, cluster: Cluster, body: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Returns the tokens of an answer, and which nodes were killed in the middle of it: none where
    it had ended before they were asked."""
    found: list[int] = []
    killed: list[int] = []
    async with session.post(f"{cluster.url}/v1/chat/completions", json=body) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                found += choice.get("token_ids") or []
            if len(found) >= 2 and not killed:
                killed = [n.pid for n in cluster.decodes if await _has_open_answer(session, n.url)]
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
    return found, killed


def _value(metrics: str, name: str) -> float:
    (line,) = (line for line in metrics.splitlines() if line.startswith(name + "{"))
    return float(line.rsplit(" ", 1)[1])


async def _has_open_answer(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    return any(float(line.rsplit(" ", 1)[1]) > 0 for line in lines)

"""Requests that do not say are sampled as the checkpoint advises, or as the operator wants."""

from __future__ import annotations

import json
import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from decode_node.config import DecodeNodeSettings
from decode_node.served_text import find_defaults
from engine.contracts.errors import CannotStartError
from engine.models.config.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from tests.decode_node.http_node import CONTEXT, http_node
from tests.engine.tiny_model import tiny_model

ADVICE = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": [1]}
TEXT = {"prompt": "the dog", "seed": 4}
PAGE = ("first_id", "last_id", "has_more")
"""Anthropic's clients read these of a list."""


def write(folder: Path, **content: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def find(folder: Path, source: str = "auto", override: str = "") -> SamplingDefaults:
    return SamplingDefaults.find(tiny_model(path=str(folder)), source, override)


def test_where_defaults_come_from(tmp_path: Path) -> None:
    write(tmp_path, **ADVICE)
    other = tmp_path / "other"
    other.mkdir()
    write(other, min_p=0.1)
    advice = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert find(tmp_path).to_dict() == advice
    assert find(tmp_path, override='{"top_k": 5, "max_new_tokens": 7}').to_dict() == {
        **advice, "top_k": 5, "max_new_tokens": 7,
    }  # fmt: skip
    assert find(tmp_path, str(other)).to_dict() == {"min_p": 0.1}
    for name in ("none", "vllm"):
        assert find(tmp_path, name) == NO_DEFAULTS
        assert find(tmp_path, name, '{"top_p": 0.5}').to_dict() == {"top_p": 0.5}
    assert find(tmp_path / "nowhere") == NO_DEFAULTS


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": "x"}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_values_that_no_request_could_have_stop_the_start(
    tmp_path: Path, content: dict[str, Any], words: str
) -> None:
    write(tmp_path, **content)
    with pytest.raises(CannotStartError, match=f"generation_config.json.*{words}"):
        find(tmp_path)
    assert find(tmp_path, "none") == NO_DEFAULTS


def test_a_folder_without_the_file_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(CannotStartError, match="does not exist"):
        find(tmp_path, str(tmp_path))


@pytest.mark.parametrize("text", ["x", "[]", '{"temprature": 1}', '{"top_p": "x"}', "{"])
def test_a_wrong_override_is_a_wrong_setting(text: str) -> None:
    with pytest.raises(ValueError, match="override-generation-config"):
        DecodeNodeSettings(model="unused", override_generation_config=text)


def test_what_requests_do_not_get_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    neutral = {"num_beams": 1, "typical_p": 1.0, "min_length": 0, "forced_eos_token_id": None}
    write(tmp_path, **ADVICE, **neutral, suppress_tokens=[3], stop_strings="END")
    model = tiny_model(path=str(tmp_path))
    with caplog.at_level(logging.WARNING):
        find_defaults(DecodeNodeSettings(model="unused"), model)
        find_defaults(DecodeNodeSettings(model="unused", generation_config="none"), model)
    (record,) = caplog.records
    assert "has stop_strings, suppress_tokens, which" in record.getMessage()


async def test_defaults_apply_where_a_request_does_not_say(tmp_path: Path) -> None:
    write(tmp_path, **ADVICE, repetition_penalty=1.1, min_p=0.05, max_new_tokens=6)
    async with http_node(generation_config=str(tmp_path)) as node:
        for url, body in (
            ("/v1/completions", TEXT),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the dog"}]}),
        ):
            node.engine.requests.clear()
            answer = (await node.client.post(url, json=body)).json()
            assert answer["usage"]["completion_tokens"] == 6
            sampling = node.engine.only.request.spec.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.95, 20)
            assert (sampling.repetition_penalty, sampling.min_p) == (1.1, 0.05)
        node.engine.requests.clear()
        own = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
        await node.client.post("/v1/completions", json={**TEXT, **own, "max_tokens": 9})
        sampling = node.engine.only.request.spec.sampling
        assert {name: getattr(sampling, name) for name in own} == own
        assert sampling.max_tokens == 9
        long = {**TEXT, "prompt": [7] * (CONTEXT - 2)}
        answer = (await node.client.post("/v1/completions", json=long)).json()
        assert answer["usage"]["completion_tokens"] == 2


async def test_model_cards_tell_names_defaults_and_what_clients_look_for(tmp_path: Path) -> None:
    write(tmp_path, temperature=0.6)
    async with http_node(generation_config=str(tmp_path), aliases=("gpt-4o",)) as node:
        listed = (await node.client.get("/v1/models")).json()
        cards = listed["data"]
        assert [card["id"] for card in cards] == ["tiny", "gpt-4o"]
        assert [listed[key] for key in PAGE] == ["tiny", "gpt-4o", False]
        for card in cards:
            assert (await node.client.get(f"/v1/models/{card['id']}")).json() == card
            assert (card["root"], card["parent"]) == ("unused", None)
            assert (card["type"], card["display_name"]) == ("model", card["id"])
            assert card["lifecycle"] == "active"
            assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
            assert card["max_input_tokens"] == card["max_model_len"] == CONTEXT
            assert card["default_sampling_params"] == {"temperature": 0.6}
            (permission,) = card["permission"]
            assert permission["object"] == "model_permission" and permission["allow_sampling"]
        answer = await node.client.post("/v1/completions", json={**TEXT, "model": "gpt-4o"})
        assert answer.json()["model"] == "tiny"
        refused = await node.client.post("/v1/completions", json={**TEXT, "model": "gpt-4"})
        assert refused.status_code == 404
        assert "'tiny', 'gpt-4o'" in refused.json()["error"]["message"]

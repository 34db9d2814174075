"""Adapters at the HTTP interface of a decode node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edge.http import headers as names
from engine.contracts.outputs import LoRAStats
from engine.lora import LoRAConfig, LoRAModule
from engine.models.adapters.adapter_files import read_adapter
from tests.decode_node.http_node import http_node
from tests.engine.lora.adapter_checkpoints import AdapterShape, write_adapter
from tests.engine.models.reference_models import FAMILIES, save_checkpoint

BODY = {"prompt": [1, 2, 3], "max_tokens": 2}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the adapters `in/a` and `in/b`, and `out`, which is not below `in`."""
    folder = tmp_path_factory.mktemp("adapters")
    save_checkpoint(FAMILIES["llama"], folder / "model")
    for seed, name in enumerate(("in/a", "in/b", "out")):
        write_adapter(folder / name, folder / "model", AdapterShape(seed))
    (folder / "in" / "link").symlink_to(folder / "out")
    return folder


@pytest.fixture
def lora(root: Path) -> LoRAConfig:
    path = root / "in" / "a"
    module = LoRAModule(name="poet", path=str(path), digest=read_adapter(path, 16).digest)
    return LoRAConfig(modules=(module,), folder=str(root / "in"))


async def test_an_adapter_is_a_model_to_clients(lora: LoRAConfig) -> None:
    async with http_node(lora=lora) as node:
        cards = {card["id"]: card for card in (await node.client.get("/v1/models")).json()["data"]}
        digest = node.engine.adapters.known["poet"].digest
        assert set(cards) == {"tiny", "poet"}
        assert (cards["poet"]["parent"], cards["poet"]["root"]) == ("tiny", f"sha256:{digest}")
        assert (await node.client.get("/v1/models/poet")).json()["id"] == "poet"
        for model, adapter in (("poet", "poet"), ("tiny", None)):
            answer = await node.client.post("/v1/completions", json={**BODY, "model": model})
            assert (answer.status_code, answer.json()["model"]) == (200, model)
            asked = list(node.engine.requests.values())[-1].request.spec.adapter
            assert (asked and asked.name) == adapter
        unknown = await node.client.post("/v1/completions", json={**BODY, "model": "painter"})
        error = unknown.json()["error"]
        assert (unknown.status_code, error["code"]) == (404, "model_not_found")
        assert "'poet'" in error["message"]


async def test_a_router_means_an_adapter_by_its_digest(
    lora: LoRAConfig,
) -> None:
    async with http_node(lora=lora) as node:
        digest = node.engine.adapters.known["poet"].digest
        for meant, status in ((digest, 200), ("0" * 64, 503)):
            answer = await node.client.post(
                "/v1/completions", json={**BODY, "model": "poet"}, headers={names.ADAPTER: meant}
            )
            assert answer.status_code == status
        assert answer.json()["error"]["code"] == "adapter_changed"


async def test_adapters_are_loaded_from_below_the_folder_alone(
    lora: LoRAConfig, root: Path
) -> None:
    async with http_node(lora=lora) as node:
        for path in ("../out", str(root / "out"), "link", "/", "a\0b", "../in/../out"):
            refused = await node.client.post(LOAD, json={"lora_name": "x", "lora_path": path})
            assert refused.status_code == 400, path
            assert "--lora-dir" in refused.json()["error"]["message"]
        for body, said in (
            ({"lora_name": "poet", "lora_path": "b"}, "taken"),
            ({"lora_name": "tiny", "lora_path": "b"}, "taken"),
            ({"lora_name": "", "lora_path": "b"}, "characters"),
            ({"lora_name": "x", "lora_path": "missing"}, "cannot be read"),
            ({"lora_name": "x"}, "lora_path"),
            ({"lora_name": "x" * 9000, "lora_path": "b"}, "bytes"),
        ):
            refused = await node.client.post(LOAD, json=body)
            assert refused.status_code in (400, 413)
            assert said in refused.json()["error"]["message"]
        loaded = await node.client.post(LOAD, json={"lora_name": "bard", "lora_path": "b"})
        assert loaded.status_code == 200
        assert loaded.json() == {"name": "bard", "digest": read_adapter(root / "in/b", 16).digest}
        answer = await node.client.post("/v1/completions", json={**BODY, "model": "bard"})
        assert answer.status_code == 200
        gone = await node.client.post(UNLOAD, json={"lora_name": "bard"})
        assert gone.status_code == 200
        for path, body in (("/v1/completions", {**BODY, "model": "bard"}), (UNLOAD, {})):
            missing = await node.client.post(path, json={"lora_name": "bard", **body})
            assert missing.status_code == 404


async def test_another_adapter_takes_a_name_in_place(lora: LoRAConfig, root: Path) -> None:
    async with http_node(lora=lora) as node:
        old = node.engine.adapters.known["poet"].digest
        body = {"lora_name": "poet", "lora_path": "b", "load_inplace": True}
        assert (await node.client.post(LOAD, json=body)).json()["digest"] != old
        told = [type(call).__name__ for call in node.engine.adapters.told]
        assert told == ["AddAdapter", "RemoveAdapter"]


async def test_without_a_folder_none_is_loaded_and_keys_of_clients_change_nothing(
    lora: LoRAConfig, tmp_path: Path
) -> None:
    body = {"lora_name": "x", "lora_path": "b"}
    async with http_node(lora=replace(lora, folder="")) as node:
        refused = await node.client.post(LOAD, json=body)
        assert refused.status_code == 400
        assert "--lora-dir" in refused.json()["error"]["message"]
    token = tmp_path / "token"
    token.write_text("t" * 32)
    async with http_node(lora=lora, api_keys="key", cluster_token_file=token) as node:
        for path in (LOAD, UNLOAD):
            as_client = {"authorization": "Bearer key"}
            refused = await node.client.post(path, json=body, headers=as_client)
            assert refused.status_code == 403


async def test_metrics_name_the_adapters_of_requests(lora: LoRAConfig) -> None:
    async with http_node(lora=lora) as node:
        digest = node.engine.adapters.known["poet"].digest
        node.engine.stats.lora = LoRAStats(running=[digest], loaded=[digest])
        text = (await node.client.get("/metrics")).text
    (info,) = (line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{"))
    for label in ('max_lora="1"', 'running_lora_adapters="poet"', 'waiting_lora_adapters=""'):
        assert label in info
    assert "tandem_lora_adapters_loaded{" in text

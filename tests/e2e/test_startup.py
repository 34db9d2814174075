"""Nodes that cannot work end at the start, with the path and the cure; nodes that do not fit each
other are told so, and requests are answered all the same."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REMOTE = ["--local-prefill-threshold", "0"]


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def change_config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change


def overwrite(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def cut_off(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100_000)


DAMAGES = [
    ("prefill_node", "no config", remove("config.json"), ["config.json", "is missing"]),
    ("decode_node", "no weights", remove("model.safetensors"), ["safetensors", "save_pretrained"]),
    ("decode_node", "no tokenizer", remove("tokenizer.json"), ["tokenizer.json", "is missing"]),
    (
        "decode_node", "another architecture", change_config(architectures=["MambaForCausalLM"]),
        ["MambaForCausalLM", "LlamaForCausalLM"],
    ),
    ("prefill_node", "weights cut off", cut_off, ["model.safetensors", "cut off", "again"]),
    (
        "prefill_node", "weights of another size", change_config(intermediate_size=100),
        ["model.safetensors", "shape [384, 128]", "download"],
    ),
    ("prefill_node", "half a config", overwrite("config.json", '{"a":'), ["valid JSON", "again"]),
    (
        "decode_node", "half a tokenizer", overwrite("tokenizer.json", "{"),
        ["tokenizer.json", "valid JSON", "again"],
    ),
    ("decode_node", "no tokens", overwrite("tokenizer.json", "{}"), ["cannot be read"]),
    (
        "decode_node", "half a template", overwrite("chat_template.jinja", "{% for"),
        ["does not compile", "again"],
    ),
]  # fmt: skip


def run_node(module: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, "--device", "cpu", "--port", "0", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("module", "damage", "words"), [(m, d, w) for m, _, d, w in DAMAGES],
    ids=[name for _, name, _, _ in DAMAGES],
)  # fmt: skip
def test_damaged_checkpoints_end_the_start(
    demo_checkpoint: Path,
    tmp_path: Path,
    module: str,
    damage: Callable[[Path], None],
    words: list[str],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_checkpoint, folder)
    damage(folder)
    result = run_node(module, "--model", str(folder))
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert str(folder) in last and all(word in last for word in words), last
    assert '"ready"' not in result.stdout


@pytest.mark.e2e
@pytest.mark.real_start
@pytest.mark.parametrize("module", ["prefill_node", "decode_node", "router"])
def test_a_port_that_is_taken_is_named(demo_checkpoint: Path, module: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        model = ["--decode", "127.0.0.1:1/2"] if module == "router" else ["--model"]
        args = model if module == "router" else ["--device", "cpu", *model, str(demo_checkpoint)]
        command = [sys.executable, "-m", module, "--port", port, *args]
        result = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert result.returncode == 1
    assert f"127.0.0.1:{port}" in result.stderr.splitlines()[-1]


@pytest.mark.e2e
async def test_nodes_that_do_not_fit_name_the_field_and_serve(
    start_cluster: Any, complete: Any, demo_checkpoint: Path, tmp_path: Path
) -> None:
    """The router says it when the node appears, the decode node when it is sent there all the
    same; the prompt is computed by the decode node alone."""
    folder = tmp_path / "other"
    shutil.copytree(demo_checkpoint, folder)
    change_config(num_hidden_layers=2)(folder)
    other_model = ["--model", str(folder), "--load-format", "dummy"]
    for field, args in (("dtype", ["--dtype", "bfloat16"]), ("model", other_model)):
        cluster = await start_cluster(prefill_args=args, decode_args=REMOTE)
        header = {"x-prefiller-host-port": cluster.prefills[0].address}
        for url in (cluster.url, cluster.decodes[0].url):
            body = {"prompt": [7] * 50, "max_tokens": 4, "ignore_eos": True}
            result = await complete(url, headers=header, **body)
            assert result.error is None and result.usage["completion_tokens"] == 4
            assert result.timeline["path"] == "local"
        await cluster.wait_log("router", "fits no node of the other tier")
        assert field in await cluster.wait_log("decode", "prefill failed")
        await cluster.wait_empty()

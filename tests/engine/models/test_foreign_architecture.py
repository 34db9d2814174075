"""A checkpoint of an architecture that is not here is refused at once: by name, with the nearest
one, and with what differs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.__main__ import main as tandem
from engine.models.checkpoint import CheckpointError, load_model_config, resolve_model
from engine.models.config.foreign import DIFFERENCES
from engine.models.config.wrappers import WRAPPERS
from engine.models.files import hub
from engine.models.registry import MODELS

LLAMA4 = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": {"model_type": "llama4_text", "hidden_size": 5120},
}
"""Lacks on purpose what every decoder's config.json has: it is the text part that has it."""


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "nearest", "difference"),
    [
        (LLAMA4, "LlamaForCausalLM", "attention within chunks"),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "LlamaForCausalLM", "gate"),
        (
            {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"},
            "DeepseekV4ForCausalLM",
            "n-gram memory",
        ),
        ({"architectures": ["Qwen3MoeModel"], "model_type": "x"}, "Qwen3MoeForCausalLM", ""),
        ({"architectures": ["Mistrall4ForCausalLM"], "model_type": "mistrall4"}, "", ""),
        ({"architectures": ["Cohere2Next"], "model_type": "cohere2_next"}, "", ""),
        ({"architectures": None, "model_type": "mixtral"}, "MixtralForCausalLM", ""),
        (
            {
                "architectures": ["SomeVisionModel"],
                "model_type": "some_vision",
                "text_config": {"model_type": "gemma3n_text"},
            },
            "Gemma3ForCausalLM",
            "embeddings of each layer",
        ),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "", "encodes its input"),
        ({"architectures": ["Xyzzy"], "model_type": "xyzzy"}, "", ""),
        ({}, "", ""),
    ],
    ids=lambda value: str(value.get("architectures")) if isinstance(value, dict) else "",
)
def test_the_nearest_architecture_and_what_differs(
    config: dict[str, Any], nearest: str, difference: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_model_config(write(tmp_path, config))
    said = str(caught.value)
    names = config.get("architectures") or ["none"]
    assert said.startswith(f"{tmp_path / 'config.json'}: names architecture {names[0]}")
    known = ", ".join(sorted([*MODELS, *WRAPPERS]))
    assert caught.value.cure == f"use a checkpoint of one of {known}"
    assert ("the nearest that it has is" in said) == bool(nearest)
    assert nearest in said.removesuffix(caught.value.cure)
    assert ("what differs" in said) == bool(difference)
    assert difference in said


def test_differences_are_to_architectures_that_are_here() -> None:
    assert {nearest for nearest, _ in DIFFERENCES.values()} <= {"", *MODELS, *WRAPPERS}


def test_serve_exits_at_once_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It starts no process, and looks for no weights: there are none here."""
    assert tandem(["serve", str(write(tmp_path, LLAMA4)), "--device", "cpu"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "Llama4ForConditionalGeneration" in line and "LlamaForCausalLM" in line


@pytest.mark.parametrize("node", ["decode_node", "prefill_node"])
def test_a_node_exits_with_one_error(node: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", node, "--model", str(write(tmp_path, LLAMA4)), "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1, ended.stderr
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"{node.replace('_', ' ')}: ")
    assert "Llama4ForConditionalGeneration" in line and "LlamaForCausalLM" in line


def test_nothing_is_downloaded_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(write(tmp_path, LLAMA4))

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match="Llama4ForConditionalGeneration"):
        resolve_model("some-org/some-model")
    assert asked == [["config.json", "params.json"]]

"""Tests that the engine's perplexity is transformers', and that quantisation moves it as little as
the formats promise."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from bench import record
from bench.quality import perplexity
from bench.quality.round_to_int4 import write_int4
from engine.models.checkpoint import load_model_config
from engine.quantization import Int4Scheme


def test_the_table(demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    perplexity.main(["--num-tokens", "400", "--length", "90", "--device", "cpu"])
    (path,) = tmp_path.glob("perplexity-demo_checkpoint-cpu.json")
    found = json.loads(path.read_text())["figures"]
    by_variant = {figure["variant"]: figure for figure in found["figures"]}
    assert len(by_variant) == len(perplexity.VARIANTS) - 1  # no file of scales was given

    texts = perplexity.read_texts(demo_checkpoint, None, 400, 90)
    assert all(len(text) <= 90 for text in texts)
    assert found["num_tokens"] == sum(len(text) - 1 for text in texts) >= 300
    model = LlamaForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.float32).eval()
    total = 0.0
    with torch.no_grad():
        for text in texts:
            tokens = torch.tensor(text)
            logits = model(tokens[None]).logits[0, :-1]
            total += float(cross_entropy(logits, tokens[1:], reduction="sum"))
    assert math.isclose(by_variant["float32"]["nats"], total / found["num_tokens"], rel_tol=1e-4)
    for name, least, most in (
        ("float32", 0.0, 0.0),
        ("bfloat16", 1e-4, 0.01),
        ("FP8 weights", 1e-3, 0.05),
        ("FP8 KV, scales 1.0", 1e-3, 0.05),
        ("FP8 weights and KV", 1e-3, 0.05),
        ("4-bit weights", 5e-3, 0.1),
    ):
        assert least <= by_variant[name]["moved"] <= most, name
        assert abs(by_variant[name]["over_first"]) < 0.01, name


def test_rounded_weights_are_a_checkpoint(demo_checkpoint: Path, tmp_path: Path) -> None:
    write_int4(demo_checkpoint, tmp_path)
    model = load_model_config(tmp_path)
    assert model.quantization is not None
    scheme = model.quantization.scheme_of("model.layers.0.mlp.down_proj")
    assert isinstance(scheme, Int4Scheme) and (scheme.group_size, scheme.symmetric) == (32, True)
    assert model.quantization.scheme_of("lm_head") is None


def test_texts_of_a_file(demo_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("One day the river rose. " * 40)
    texts = perplexity.read_texts(demo_checkpoint, path, 60, 25)
    assert [len(text) for text in texts] == [25, 25, 25]

"""Tests that calibrated scales are those of the largest keys and values that transformers has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from engine.calibration.__main__ import LARGEST, main, run, scale_file
from engine.calibration.observer import LargestKeysAndValues
from engine.frontend.tokenizer import Tokenizer
from engine.models.checkpoint import load_model_config
from engine.models.errors import CheckpointError
from engine.models.kv_scale_files import choose_kv_scales
from tests.engine.models.reference_models import FAMILIES, reference, save_checkpoint

TEXTS = ["The river was high that spring.", "Two and two are four, and", "x = 1"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(TEXTS))
    return path


def test_scales_are_those_of_the_largest_numbers(
    demo_checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    """The one token that is added to each text is not in the cache yet."""
    output = tmp_path / "scales.json"
    given = ["--model", str(demo_checkpoint), "--output", str(output), "--prompts", str(prompts)]
    assert main([*given, "--num-tokens", "1", "--device", "cpu"]) == 0

    model = load_model_config(demo_checkpoint)
    table = choose_kv_scales(model, "fp8", output)
    assert table is not None and str(output) in table.source
    tokenizer = Tokenizer.of_model(model)
    reference = LlamaForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.float32).eval()
    largest = torch.zeros(model.num_layers, 2, model.num_kv_heads)
    for text in TEXTS:
        cache = DynamicCache()
        with torch.no_grad():
            reference(torch.tensor([tokenizer.encode(text)]), past_key_values=cache)
        for layer, of_layer in enumerate(cache.layers):
            for kind, numbers in enumerate((of_layer.keys, of_layer.values)):
                seen = numbers[0].abs().amax(dim=(1, 2))
                largest[layer, kind] = torch.maximum(largest[layer, kind], seen)
    found = torch.tensor([list(pair) for pair in zip(table.k, table.v, strict=True)])
    torch.testing.assert_close(found * LARGEST, largest, rtol=1e-4, atol=0.0)


def test_more_text_gives_no_smaller_scales(
    demo_checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    found = []
    for max_tokens in ("1", "12"):
        output = tmp_path / f"{max_tokens}.json"
        given = ["--model", str(demo_checkpoint), "--output", str(output)]
        main([*given, "--prompts", str(prompts), "--num-tokens", max_tokens, "--device", "cpu"])
        scales = json.loads(output.read_text())
        found.append(torch.tensor([scales["k"], scales["v"]]))
    assert (found[1] >= found[0] * (1 - 1e-5)).all()
    assert (found[1] > found[0] * 1.01).any()


def test_mistakes_are_told(
    demo_checkpoint: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--output", str(tmp_path / "s.json"), "--device", "cpu", "--model"]
    assert main([*given, str(tmp_path / "nothing")]) == 1
    assert "does not exist" in capsys.readouterr().err
    prompts.write_text("\n\n")
    assert main([*given, str(demo_checkpoint), "--prompts", str(prompts)]) == 1
    assert "nothing to calibrate with" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*given, str(demo_checkpoint), "--num-tokens", "0"])


def test_latents_have_one_scale(tmp_path: Path) -> None:
    """transformers caches latents and keys as two tensors, and rotates other pairs of the keys."""
    folder = tmp_path / "latent"
    save_checkpoint(FAMILIES["deepseek_v2"], folder)
    model = load_model_config(folder)
    observer = LargestKeysAndValues()
    run(model, "cpu", [[5, 6, 7, 8]], 1, observer)
    cache = DynamicCache()
    with torch.no_grad():
        reference(folder)(torch.tensor([[5, 6, 7, 8]]), past_key_values=cache)
    assert len(observer.largest) == len(cache.layers) == model.num_layers
    for ours, theirs in zip(observer.largest, cache.layers, strict=True):
        largest = max(float(theirs.keys.abs().max()), float(theirs.values.abs().max()))
        torch.testing.assert_close(ours, torch.full((2, 1), largest), rtol=1e-4, atol=0.0)
    scales = scale_file(model, observer.largest)
    assert all(len(of_layer) == 1 for of_layer in scales.k)


def test_scales_belong_to_a_quantization(
    demo_checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    """Weights that are quantised as they are loaded are another model."""
    output = tmp_path / "scales.json"
    given = ["--model", str(demo_checkpoint), "--output", str(output), "--prompts", str(prompts)]
    assert main([*given, "--num-tokens", "1", "--device", "cpu", "--quantization", "fp8"]) == 0
    model = load_model_config(demo_checkpoint, quantization="fp8")
    assert choose_kv_scales(model, "fp8", output) is not None
    with pytest.raises(CheckpointError, match="another quantization"):
        choose_kv_scales(load_model_config(demo_checkpoint), "fp8", output)

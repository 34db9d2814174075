"""gpt-oss: both forms of its checkpoint, lengths around its window, and what crosses the wire."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench.engine.models.shapes import config_json
from engine.layers.methods.registry import UnsupportedScheme
from engine.models.checkpoint import load_model_config
from engine.models.errors import CheckpointError
from engine.parallel.distributed import ParallelGroup
from kv_transfer.config import KVTransferConfig
from tests.engine.kv_groups.grouped_node import GroupedNode, engine_config, hand_over, run_until
from tests.engine.models.gpt_oss_checkpoint import write_checkpoint
from tests.engine.models.gpt_oss_family import GPT_OSS_FAMILIES, WINDOW, publish
from tests.engine.models.loaded_parameters import parameters, parameters_of
from tests.engine.models.rank_process import make_paged_model
from tests.engine.models.reference_models import (
    GreedyAnswers,
    reference,
    reference_logits,
    save_checkpoint,
)

FAMILY = GPT_OSS_FAMILIES["gpt_oss"]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns a checkpoint as it is published, and one that means the same in plain numbers."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    save_checkpoint(FAMILY, folder / "first")
    publish(folder / "first", folder / "published", folder / "meant")
    return folder / "published", folder / "meant"


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(1, 100, (length,), generator=generator).tolist()


@pytest.mark.parametrize("chunk", [1000, 50])
def test_logits_around_the_window_equal_transformers(chunk: int, tmp_path: Path) -> None:
    """The window is the published one; its faults show only in longer prompts."""
    changes = {"sliding_window": 128, "max_position_embeddings": 512}
    save_checkpoint(replace(FAMILY, changes=FAMILY.changes | changes), tmp_path)
    model = reference(tmp_path)
    asked = [prompt_of(length) for length in (127, 128, 129, 144, 384)]
    found = make_paged_model(tmp_path, ParallelGroup(0, 1)).prefill(asked, chunk)
    for prompt, logits in zip(asked, found, strict=True):
        torch.testing.assert_close(logits, reference_logits(model, prompt), rtol=1e-4, atol=2e-5)


def test_every_rank_loads_the_published_form_bit_for_bit(forms: tuple[Path, Path]) -> None:
    """Ranks' units begin inside of blocks, too."""
    for rank, size in ((0, 1), (0, 2), (1, 2), (3, 4)):
        ours, expected = (parameters(folder, rank, size) for folder in forms)
        assert ours.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(ours[name], tensor), (name, rank, size)


def test_the_published_form_computes_what_transformers_computes(forms: tuple[Path, Path]) -> None:
    published, meant = forms
    model = reference(meant)
    asked = [prompt_of(length) for length in (WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 150)]
    found = make_paged_model(published, ParallelGroup(0, 1)).prefill(asked, 40)
    for prompt, logits in zip(asked, found, strict=True):
        torch.testing.assert_close(logits, reference_logits(model, prompt), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_both_forms_compute_the_same_in_half_precision(
    device: str, forms: tuple[Path, Path]
) -> None:
    asked = [prompt_of(length) for length in (1, WINDOW, 150)]
    first, second = (
        torch.cat(make_paged_model(form, ParallelGroup(0, 1), "float16", device).prefill(asked, 64))
        for form in forms
    )
    assert float((first - second).norm() / second.norm()) < 5e-3


def test_two_nodes_and_only_the_window_of_windowed_layers_crosses(forms: tuple[Path, Path]) -> None:
    published, meant = forms
    block_size, lengths = 16, (WINDOW - 1, WINDOW, WINDOW + 1, 64, 121)
    with ExitStack() as stack:
        nodes = []
        for role, ranks in (("kv_producer", 2), ("kv_consumer", 1)):
            kv = KVTransferConfig(kv_role=role, transports="stream", num_streams=2)  # type: ignore[arg-type]
            config = engine_config(
                load_model_config(published),
                block_size=block_size,
                num_blocks=160,
                tp_size=ranks,
                kv_transfer=kv,
            )
            nodes.append(GroupedNode.start(config))
            stack.callback(nodes[-1].shutdown)
        decode = nodes[1]
        hand_over(*nodes, {str(n): prompt_of(n) for n in lengths}, GreedyAnswers(reference(meant)))
        assert decode.core.stats().prompt_tokens_computed == 0
        layers = FAMILY.changes["num_hidden_layers"] // 2
        block_bytes = layers * 2 * 2 * block_size * FAMILY.changes["head_dim"] * 4
        pulled = {result.request_id: result.stats.num_bytes for result in decode.results}
        for n in lengths:
            all_blocks, unseen = -(-n // block_size), max(0, n - WINDOW + 1) // block_size
            assert pulled[str(n)] == (2 * all_blocks - unseen) * block_bytes, n
        assert pulled["121"] < 0.7 * 2 * 8 * block_bytes


def test_one_node_with_little_room(forms: tuple[Path, Path]) -> None:
    """Chunks, hits in the prefix cache and preemptions."""
    published, meant = forms
    oracle = GreedyAnswers(reference(meant))
    config = engine_config(load_model_config(published), block_size=16, num_blocks=26)
    node = GroupedNode.start(config)
    with ExitStack() as stack:
        stack.callback(node.shutdown)
        asked = {f"{turn}-{n}": prompt_of(n) for turn in range(2) for n in (17, 20, 34, 50)}
        for name, prompt in asked.items():
            node.add(name, prompt, 60)
        run_until([node], lambda: len(node.ended) == len(asked))
        for name, prompt in asked.items():
            found = node.tokens[name]
            assert found == oracle.tokens(prompt, 60, found), name
        assert node.core.stats().num_preemptions > 0
        for name, prompt in (("warm", prompt_of(90)), ("again", [*prompt_of(90), 5, 6, 7])):
            hits = node.core.stats().prefix_cache_hits
            node.add(name, prompt, 20)
            run_until([node], lambda name=name: name in node.ended)  # type: ignore[misc]
            found = node.tokens[name]
            assert found == oracle.tokens(prompt, 20, found)
        assert node.core.stats().prefix_cache_hits - hits == 80
        node.check_empty()


def tiny_shape() -> dict[str, Any]:
    sizes = {
        "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 256,
    }  # fmt: skip
    return config_json("gpt-oss-20b") | sizes


def test_written_checkpoints_are_in_the_published_form(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_shape())
    config = load_model_config(tmp_path)
    assert config.dtype == "bfloat16"
    tensors: dict[str, torch.Tensor] = {}
    for path in tmp_path.glob("*.safetensors"):
        tensors |= load_file(path)
    experts = "model.layers.1.mlp.experts."
    shapes = {name: tuple(t.shape) for name, t in tensors.items() if name.startswith(experts)}
    assert shapes == {
        experts + "gate_up_proj_blocks": (32, 192, 2, 16),
        experts + "gate_up_proj_scales": (32, 192, 2),
        experts + "gate_up_proj_bias": (32, 192),
        experts + "down_proj_blocks": (32, 64, 3, 16),
        experts + "down_proj_scales": (32, 64, 3),
        experts + "down_proj_bias": (32, 64),
    }
    loaded = parameters(tmp_path, 0, 1)
    w13 = loaded["layers.1.mlp.experts.w13"]
    assert w13.isfinite().all() and 0.01 < float(w13.std()) < 0.05
    model = make_paged_model(tmp_path, ParallelGroup(0, 1))
    assert model.prefill([prompt_of(60)], 32)[0].isfinite().all()


def test_dummy_weights_are_slices_of_the_same_numbers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_shape()))
    config = load_model_config(tmp_path, load_format="dummy", dtype="float32")
    whole, second = (parameters_of(config, rank, size) for rank, size in ((0, 1), (1, 2)))
    name = "layers.0.mlp.experts."
    gates, ups = whole[name + "w13"].chunk(2, dim=1)
    assert torch.equal(second[name + "w13"], torch.cat((gates[:, 48:], ups[:, 48:]), dim=1))
    assert torch.equal(second[name + "w2"], whole[name + "w2"][:, :, 48:])
    assert 0.01 < float(whole[name + "w13"].std()) < 0.05
    assert name + "b2" in whole and name + "b2" not in second


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 80}, "80 inputs are no whole blocks of 32"),
        ({"swiglu_limit": 0.0}, "swiglu_limit"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_shape() | changes))
    with pytest.raises((CheckpointError, UnsupportedScheme), match=said):
        parameters_of(load_model_config(tmp_path, load_format="dummy"), 0, 1)

"""Folders that cannot be served are refused with the path, the fault and the cure; the rest are
read as transformers means them."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import get_session
from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.config import EngineConfig, ModelConfig, ParallelConfig
from engine.layers.rotary import cos_sin_cache
from engine.models.checkpoint import (
    CheckpointError,
    check_parallel,
    load_model_config,
    resolve_model,
)
from engine.models.factory import create_model
from engine.models.files import hub
from engine.models.loader import load_weights
from engine.models.registry import spec_of
from engine.models.specs.dense import DenseSpec
from engine.parallel.distributed import ParallelGroup
from engine.rope import LongRope, RopeScaling
from tests.engine.models.parity_cases import prompts
from tests.engine.models.rank_process import make_paged_model
from tests.engine.models.reference_models import FAMILIES, reference, reference_logits
from tests.engine.tiny_model import place_alone

SHARDED = "llama3_rope_tied_sharded"


@pytest.fixture
def copy(checkpoints: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies a checkpoint of the named family, which the test may break."""

    def make(family: str = "llama") -> Path:
        folder = tmp_path / family
        shutil.copytree(checkpoints / family, folder)
        (folder / "tokenizer.json").write_text("{}")
        return folder

    return make


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def load(folder: Path) -> list[float]:
    """Loads config, model and weights; returns what was reported."""
    config = EngineConfig(engine_id="load", epoch=1, model=load_model_config(folder))
    reported: list[float] = []
    load_weights(create_model(config, place_alone(config.model), "cpu"), config, reported.append)
    return reported


def check_error(error: CheckpointError, path: Path, *words: str) -> None:
    assert str(path) in str(error)
    for word in words:
        assert word in str(error)
    assert error.cure and str(error).endswith(error.cure)


# What is read ---------------------------------------------------------------------------------


def test_both_spellings_of_rope_settings_mean_the_same(checkpoints: Path) -> None:
    newer = spec(checkpoints / SHARDED)
    older = spec(checkpoints / "llama3_rope_older_config")
    assert newer.rotary == older.rotary
    assert newer.rotary.theta == 500.0
    assert newer.rotary.scaling == RopeScaling(
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    assert spec(checkpoints / "llama").rotary.scaling is None


def spec(folder: Path, **settings: Any) -> DenseSpec:
    found = spec_of(load_model_config(folder, **settings))
    assert isinstance(found, DenseSpec)
    return found


def test_families(checkpoints: Path) -> None:
    qwen2 = spec(checkpoints / "qwen2")
    assert (qwen2.attention_bias, qwen2.head_norm, qwen2.rotary.theta) == (True, "none", 1e6)
    qwen3 = spec(checkpoints / "qwen3_tied")
    assert (qwen3.attention_bias, qwen3.head_norm) == (False, "each")
    assert load_model_config(checkpoints / "qwen3_tied").head_dim == 24
    assert qwen3.tie_word_embeddings
    llama = load_model_config(checkpoints / "llama", served_model_name="tiny", max_model_len=50)
    assert (llama.head_dim, llama.served_model_name, llama.max_model_len) == (16, "tiny", 50)
    several = load_model_config(checkpoints / "llama", served_model_name="a, b,a,")
    assert several.served_names == ("a", "b")


IN_TRANSFORMERS = [
    name
    for name, family in FAMILIES.items()
    if family.vision is None and family.model.__module__.startswith("transformers.")
]
"""Others are put together from parts of several families, whose configurations say nothing of
theirs."""


@pytest.mark.parametrize("family", IN_TRANSFORMERS)
def test_what_config_json_leaves_out_is_as_transformers_completes_it(
    family: str, copy: Callable[[str], Path]
) -> None:
    folder, default = copy(family), FAMILIES[family].config().to_dict()
    asked = json.loads((folder / "config.json").read_text())
    rope = default.get("rope_parameters") or {}
    has_plain_rope = (
        rope.get("rope_type") == "default"
        and rope.keys() == asked.get("rope_parameters", {}).keys()
    )
    for name in ("rms_norm_eps", "routed_scaling_factor", *["rope_parameters"] * has_plain_rope):
        if name in default:
            edit_config(folder, **{name: default[name]})
            whole = spec(folder)
            edit_config(folder, **{name: "absent"})
            assert spec(folder) == whole, name
            edit_config(folder, **{name: asked[name]})


def test_eos_of_generation_config_comes_first(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert load_model_config(folder).eos_token_ids == (5, 6)
    (folder / "generation_config.json").unlink()
    edit_config(folder, eos_token_id=9)
    assert load_model_config(folder).eos_token_ids == (9,)
    edit_config(folder, eos_token_id=[-1, 9, load_model_config(folder).vocab_size])
    assert load_model_config(folder).eos_token_ids == (9,), "the others have no logits"
    edit_config(folder, eos_token_id=None)
    assert load_model_config(folder).eos_token_ids == ()


@pytest.mark.parametrize("as_object", [False, True])
def test_the_tokenizers_own_end_is_one_too(copy: Callable[[str], Path], as_object: bool) -> None:
    """Chat models trained from a base model often tell the end of a turn there alone."""
    folder = copy("llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    tokens = [{"id": 9, "content": "<|endoftext|>"}, {"id": 7, "content": "<|im_end|>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens, "model": {}}))
    end: object = {"content": "<|im_end|>", "lstrip": False} if as_object else "<|im_end|>"
    listed = {"eos_token": end, "added_tokens_decoder": {}}
    (folder / "tokenizer_config.json").write_text(json.dumps(listed))
    assert load_model_config(folder).eos_token_ids == (9, 7)
    beside = folder / "special_tokens_map.json"
    beside.write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    assert load_model_config(folder).eos_token_ids == (9, 7), "all tokens are listed, this one too"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    assert load_model_config(folder).eos_token_ids == (9,), "the map counts for more"
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": []}))
    assert load_model_config(folder).eos_token_ids == (9,)


def test_auto_dtype(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    edit_config(folder, dtype="float16")
    assert load_model_config(folder).dtype == "float16"
    assert load_model_config(folder, dtype="bfloat16").dtype == "bfloat16"
    edit_config(folder, dtype="absent")
    assert load_model_config(folder).dtype == "float32"


def test_model_hash_follows_what_the_kv_depends_on(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    original = load_model_config(folder).model_hash
    moved = folder.rename(folder.with_name("moved"))
    same = load_model_config(moved, dtype="bfloat16", max_model_len=7, served_model_name="x")
    assert same.model_hash == original
    edit_config(moved, rms_norm_eps=1e-4)
    changed_config = load_model_config(moved).model_hash
    edit_config(moved, rms_norm_eps=1e-6)
    weights = load_file(moved / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][-1, -1] += 0.5
    save_file(weights, moved / "model.safetensors")
    changed_weights = load_model_config(moved).model_hash
    assert len({original, changed_config, changed_weights}) == 3


def test_dummy_needs_no_weights_and_is_the_same_for_every_sharding(
    copy: Callable[[str], Path],
) -> None:
    folder = copy("qwen2")
    (folder / "model.safetensors").unlink()
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer.json").unlink()
    assert resolve_model(str(folder), load_format="dummy") == folder
    model = load_model_config(folder, load_format="dummy")
    config = EngineConfig(engine_id="dummy", epoch=1, model=model)
    first, second = (create_model(config, place_alone(config.model), "cpu") for _ in range(2))
    for created in (first, second):
        load_weights(created, config, lambda fraction: None)
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.std() > 0


def test_loading_reports_growing_fractions(checkpoints: Path) -> None:
    for family in ("llama", SHARDED):
        reported = load(checkpoints / family)
        assert reported == sorted(reported)
        assert reported[-1] == 1.0
        assert len(reported) > 20


# Folders that are refused ---------------------------------------------------------------------


def test_resolve_finds_a_complete_folder(copy: Callable[[str], Path]) -> None:
    reported: list[float] = []
    folder = copy(SHARDED)
    assert resolve_model(str(folder), reported.append) == folder
    assert reported == [1.0]


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_model(str(tmp_path / "absent"))
    check_error(caught.value, tmp_path / "absent", "does not exist", "check the path")


def test_file_instead_of_folder(copy: Callable[[str], Path]) -> None:
    path = copy("llama") / "config.json"
    with pytest.raises(CheckpointError) as caught:
        resolve_model(str(path))
    check_error(caught.value, path, "is a file")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_missing_file(name: str, copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / name).unlink()
    with pytest.raises(CheckpointError) as caught:
        resolve_model(str(folder))
    check_error(caught.value, folder / name, "is missing")


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="adapter in --lora-modules"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("pytorch_model.bin", "pytorch_model.bin (pickled), but neither"),
        ("qmodel.pt", "HQQ's own, pickled"),
        ("model.tensors", "tensorizer's"),
    ],
)
def test_missing_weights(file: str, kind: str, copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / "model.safetensors").rename(folder / file)
    for refuse in (lambda: resolve_model(str(folder)), lambda: load_model_config(folder)):
        with pytest.raises(CheckpointError) as caught:
            refuse()
        check_error(caught.value, folder, kind, "neither model.safetensors nor", "safetensors only")


class _Hub(BaseHTTPRequestHandler):
    """Sends on to a signed address, as the hub does for files."""

    def do_GET(self) -> None:
        is_signed = "secret" in self.path
        self.send_response(200 if is_signed else 302)
        self.send_header("location", "/file?Signature=secret")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def test_no_log_tells_signed_addresses_of_files(caplog: pytest.LogCaptureFixture) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with caplog.at_level(logging.DEBUG):
            url = f"http://127.0.0.1:{server.server_port}/"
            answer = get_session().get(url, follow_redirects=True)
        server.shutdown()
    assert str(answer.url).endswith("secret")
    assert "secret" not in caplog.text


def test_hub_name_that_cannot_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError(f"{name} {allow_patterns}")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError) as caught:
        resolve_model("some-org/some-model")
    check_error(caught.value, Path("some-org/some-model"), "cannot be downloaded", "network")


def test_hub_name_is_downloaded(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = copy("llama").parent / "models--some-org--some-model" / "snapshots"
    snapshots.mkdir(parents=True)
    folder = (snapshots.parent.parent / "llama").rename(snapshots / "0a1b")
    asked: list[list[str]] = []
    revisions: list[str | None] = []
    published = [
        "config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json",
        "model-00001-of-00002.safetensors", "README.md", "original/model.safetensors",
        "consolidated.safetensors", "metal/model.bin",
    ]  # fmt: skip

    def download(
        name: str,
        revision: str | None,
        allow_patterns: list[str],
        ignore_patterns: Sequence[str] = (),
    ) -> str:
        revisions.append(revision)
        asked.append(
            list(
                filter_repo_objects(
                    published, allow_patterns=allow_patterns, ignore_patterns=list(ignore_patterns)
                )
            )
        )
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert resolve_model("some-org/some-model") == folder
    assert asked == [["config.json"], published[:5]]
    assert load_model_config(folder).served_model_name == "some-org/some-model"
    assert resolve_model("some-org/some-model", revision="0a1b") == folder
    assert revisions == [None, None, "0a1b", "0a1b"]


def test_a_revision_that_there_is_not(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, **options: Any) -> str:
        raise RevisionNotFoundError(f"{name} {options['revision']}", response=Mock(headers={}))

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(CheckpointError) as caught:
        resolve_model("some-org/some-model", revision="v9")
    check_error(
        caught.value, Path("some-org/some-model"), "has no revision v9", "a tag or a commit"
    )
    folder = copy("llama")
    with pytest.raises(CheckpointError) as caught:
        resolve_model(str(folder), revision="v9")
    check_error(caught.value, folder, "which has no revision v9", "leave --revision")


# config.json ----------------------------------------------------------------------------------


def test_bad_json(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / "config.json").write_text('{"vocab_size": 3,')
    with pytest.raises(CheckpointError) as caught:
        load_model_config(folder)
    check_error(caught.value, folder / "config.json", "not valid JSON")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "64"}, ("hidden_size", "correct the field")),
        ({"num_hidden_layers": "absent"}, ("num_hidden_layers", "missing")),
        ({"num_hidden_layers": 0}, ("size below 1",)),
        ({"hidden_act": "gelu"}, ("'gelu'",)),
        ({"mlp_bias": True}, ("mlp_bias",)),
        ({"num_key_value_heads": 3}, ("4 heads over 3",)),
        ({"quantization_config": {"quant_method": "aqlm"}}, ("'aqlm'", "quant_method")),
        ({"layer_types": ["sliding_attention"] * 3}, ("sliding window",)),
        ({"rope_parameters": {"rope_type": "spiral"}}, ("'spiral'",)),
        ({"rope_parameters": {"rope_type": "linear"}}, ("'linear' without its factor",)),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, ("low_freq_factor",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "part of each head")),
        ({"dtype": "float64"}, ("'float64'", "bfloat16")),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_config_that_is_refused(
    changes: dict[str, Any], words: tuple[str, ...], copy: Callable[[str], Path]
) -> None:
    folder = copy("llama")
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError) as caught:
        load_model_config(folder)
    check_error(caught.value, folder / "config.json", *words)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mistral", {"layer_types": ["sliding_attention"] * 3}, ("sliding window", "use_sliding")),
        ("mistral", {"rope_parameters": {"rope_type": "longrope"}}, ("'longrope'",)),
        (
            "phi3",
            {"rope_parameters": {"partial_rotary_factor": 1.5}},
            ("partial_rotary_factor", "1.5 of a head"),
        ),
        (
            "mistral",
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
            ("rope_scaling", "'yarn' beside 'default'"),
        ),
        ("gemma3", {"layer_types": ["chunked_attention"]}, ("chunked_attention", "layer_types")),
        ("gemma2", {"use_bidirectional_attention": True}, ("later tokens",)),
        ("gemma2", {"hidden_activation": "silu"}, ("'silu'",)),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "su", "long_factor": [1.0], "short_factor": [1.0]}},
            ("8 numbers in short_factor", "rope_parameters"),
        ),
        ("nemotron_h", {"time_step_limit": [{"x": "y"}, 1.0]}, ("time_step_limit",)),
        ("nemotron_h", {"moe_latent_size": -8}, ("moe_latent_size", "latents of -8 numbers")),
        ("nemotron_h", {"ssm_state_size": 0}, ("mamba_d_state",)),
        ("bamba", {"mamba_d_head": "auto", "mamba_n_heads": 6}, ("6 heads of 128 numbers",)),
        ("bamba", {"attn_layer_indices": []}, ("attn_layer_indices", "one kind alone")),
        ("bamba", {"mamba_n_groups": 3}, ("mamba_n_groups", "3 groups of 8 heads")),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, ("ssm_multipliers", "1 numbers, not 5")),
        ("falcon_h1", {"projectors_bias": True}, ("projectors_bias", "biases")),
        ("falcon_h1_normed", {"mamba_norm_before_gate": True}, ("in front of the gate",)),
        ("lfm2", {"conv_bias": True}, ("conv_bias", "biases")),
        ("lfm2", {"conv_L_cache": 1}, ("conv_L_cache", "no convolution")),
        ("lfm2", {"layer_types": ["conv"] * 4}, ("layer_types", "one kind alone")),
        ("lfm3", {"use_sandwich_norm": False}, ("use_sandwich_norm", "without norms")),
        ("nemotron_h", {"n_group": 3}, ("n_group", "3 groups of 8 experts")),
        ("nemotron_h", {"n_group": 4, "topk_group": 5}, ("topk_group", "the best 5 of 4 groups")),
        ("nemotron_h", {"n_group": 4, "topk_group": 1}, ("topk_group", "3 of the 2 experts")),
    ],
)
def test_what_an_architecture_refuses(
    family: str, changes: dict[str, Any], words: tuple[str, ...], copy: Callable[[str], Path]
) -> None:
    folder = copy(family)
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError) as caught:
        load_model_config(folder)
    check_error(caught.value, folder / "config.json", *words)


@pytest.mark.parametrize(
    ("family", "listed", "plain", "quantised"),
    [
        (
            "nemotron_h",  # ME*-MEM, so 5 is the block behind our third layer
            ["backbone.layers.0.mixer.in_proj", "backbone.layers.2.mixer*", "model.layers.5.mixer"],
            ["0.mamba.in_proj", "1.self_attn.q_proj", "2.mlp.experts.0.up_proj"],
            ["0.mamba.out_proj", "1.mlp.up_proj", "2.mamba.in_proj", "3.mamba.in_proj"],
        ),
        (
            "granite_hybrid",
            ["model.layers.2.shared_mlp.input_linear"],
            ["2.mlp.shared_mlp.gate_up_proj"],
            ["2.mlp.shared_mlp.down_proj", "1.mlp.shared_mlp.gate_up_proj"],
        ),
        (
            "lfm2",
            ["model.layers.1.feed_forward.w2", "re:.*out_proj"],
            ["1.feed_forward.down_proj", "2.self_attn.o_proj", "0.conv.out_proj"],
            ["1.feed_forward.up_proj", "2.self_attn.q_proj"],
        ),
    ],
)
def test_a_checkpoint_names_layers_that_it_leaves_plain_in_its_own_way(
    family: str,
    listed: list[str],
    plain: list[str],
    quantised: list[str],
    copy: Callable[[str], Path],
) -> None:
    folder = copy(family)
    values = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": listed}
    edit_config(folder, quantization_config=values)
    found = load_model_config(folder, load_format="dummy").quantization
    assert found is not None
    assert not any(found.scheme_of(f"model.layers.{name}") for name in plain)
    assert all(found.scheme_of(f"model.layers.{name}") for name in quantised)
    assert "written_names" not in repr(found), "nodes compare it"


@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_a_window_that_no_sequence_outgrows_is_none(
    family: str, copy: Callable[[str], Path]
) -> None:
    """It counts the token that looks back."""
    folder = copy(family)
    edit_config(folder, sliding_window=None)
    plain = load_model_config(folder, max_model_len=64)
    edit_config(folder, sliding_window=64)
    assert load_model_config(folder, max_model_len=64) == plain and plain.kv_layers == ()
    narrower = load_model_config(folder, max_model_len=65)
    assert [group.window for group in narrower.kv_layers] == [64]
    assert narrower.model_hash != plain.model_hash


def test_an_absent_window_is_that_of_transformers(copy: Callable[[str], Path]) -> None:
    for family, window in (("mistral", 4096), ("phi3", None)):
        folder = copy(family)
        edit_config(folder, sliding_window="absent", max_position_embeddings=5000)
        assert spec(folder).sliding_window == window


@pytest.mark.parametrize(("max_model_len", "name"), [(150, "short_factor"), (151, "long_factor")])
def test_longrope_is_chosen_by_the_longest_sequence(
    max_model_len: int, name: str, copy: Callable[[str], Path]
) -> None:
    folder = copy("phi3_longrope_tied")
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    factors = {"short_factor": [1.0 + i for i in range(8)], "long_factor": [9.0] * 8}
    edit_config(folder, rope_parameters={**rope, **factors})
    rotary = spec(folder, max_model_len=max_model_len).rotary
    scaling = rotary.scaling
    assert isinstance(scaling, LongRope) and scaling.factors == tuple(factors[name])
    theirs = AutoConfig.from_pretrained(folder)
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](
        theirs, torch.device("cpu"), seq_len=max_model_len
    )
    assert scaling.attention_factor == attention_factor != 1.0
    table = cos_sin_cache(16, 3, rotary)
    expected = torch.cat((frequencies.cos(), frequencies.sin())) * attention_factor
    torch.testing.assert_close(table[1], expected)
    hashes = {load_model_config(folder, max_model_len=n).model_hash for n in (150, 151, 152)}
    assert len(hashes) == 2, "nodes that rotate alike have the same hash"


@pytest.mark.parametrize(
    ("architecture", "is_scaled", "expected"),
    [
        ("LlamaForCausalLM", False, "58210e4a9e030fa534a085f0561f0869"),
        ("LlamaForCausalLM", True, "d5224a24e06709f213e1927cd053c6ec"),
        ("Qwen2ForCausalLM", False, "1d3820d29566699645bb23a4c44d5d67"),
        ("Qwen3ForCausalLM", False, "32b66049c6bd4fb9836f016db23f7053"),
    ],
)
def test_model_hash_stays_from_release_to_release(
    architecture: str, is_scaled: bool, expected: str, tmp_path: Path
) -> None:
    """Nodes of two releases serve together while one replaces the other."""
    llama3 = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = {
        "architectures": [architecture],
        "vocab_size": 1000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_theta": 500_000.0,
        **({"rope_scaling": llama3} if is_scaled else {}),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_config(tmp_path, load_format="dummy").model_hash == expected


@pytest.mark.parametrize("max_model_len", [0, 193])
def test_max_model_len_beyond_the_model(max_model_len: int, checkpoints: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_model_config(checkpoints / "llama", max_model_len=max_model_len)
    check_error(caught.value, checkpoints / "llama", str(max_model_len), "192")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_that_can_share(size: int, checkpoints: Path) -> None:
    check_parallel(
        load_model_config(checkpoints / "llama"), ParallelConfig(tensor_parallel_size=size)
    )


@pytest.mark.parametrize(
    ("family", "size", "word"), [("llama", 3, "attention heads"), ("llama", 8, "attention heads")]
)
def test_ranks_that_cannot_share(family: str, size: int, word: str, checkpoints: Path) -> None:
    model: ModelConfig = load_model_config(checkpoints / family)
    with pytest.raises(CheckpointError) as caught:
        check_parallel(model, ParallelConfig(tensor_parallel_size=size))
    check_error(caught.value, checkpoints / family, word, "tensor_parallel_size")


def test_states_that_would_lie_at_odd_bytes(copy: Callable[[str], Path]) -> None:
    folder = copy("falcon_h1")
    edit_config(folder, mamba_n_heads=1, mamba_d_head=127, mamba_d_ssm=127, mamba_n_groups=1)
    whole, half = (
        load_model_config(folder, load_format="dummy", dtype=dtype)
        for dtype in ("float32", "bfloat16")
    )
    check_parallel(whole, ParallelConfig())
    with pytest.raises(CheckpointError) as caught:
        check_parallel(half, ParallelConfig())
    check_error(caught.value, folder, "keeps 4922 bytes", "--dtype float32")


# Weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_truncated_weights(kept: int, copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    for refuse in (lambda: resolve_model(str(folder)), lambda: load_model_config(folder)):
        with pytest.raises(CheckpointError) as caught:
            refuse()
        check_error(caught.value, path, "cut off", "download the checkpoint again")


def test_broken_header(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:12] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_model_config(folder)
    check_error(caught.value, path, "broken header")


@pytest.mark.parametrize(
    ("field", "size"),
    [
        ("vocab_size", 10**12),
        ("num_hidden_layers", 10**9),
        ("max_position_embeddings", 10**15),
        ("hidden_size", 10**10),
        ("num_attention_heads", -1),
    ],
)
def test_sizes_that_no_model_has_are_refused_by_name(
    copy: Callable[[str], Path], field: str, size: int
) -> None:
    folder = copy("llama")
    edit_config(folder, **{field: size})
    with pytest.raises(CheckpointError) as caught:
        load_model_config(folder)
    check_error(caught.value, folder / "config.json", field, str(size), "correct the field")


def test_weights_cut_off_after_the_config_was_read(copy: Callable[[str], Path]) -> None:
    """A worker starts later than the node server has looked."""
    folder = copy("llama")
    config = EngineConfig(engine_id="late", epoch=1, model=load_model_config(folder))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    model = create_model(config, place_alone(config.model), "cpu")
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, config, lambda fraction: None)
    check_error(caught.value, path, "cut off")


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_missing_tensor(copy: Callable[[str], Path]) -> None:
    folder = copy("qwen2")
    change_weights(folder, lambda weights: weights.pop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    check_error(caught.value, folder, "lacks model.layers.1.self_attn.k_proj.bias")


def test_extra_tensor(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    change_weights(folder, lambda weights: weights.update({"adapter.weight": torch.ones(2)}))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    check_error(caught.value, folder, "does not use: adapter.weight")


def test_layers_that_predict_ahead_are_skipped(copy: Callable[[str], Path]) -> None:
    folder = copy("glm4_moe")
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    ahead = {f"model.layers.{layers}.eh_proj.weight": torch.zeros(2)}
    change_weights(folder, lambda weights: weights.update(ahead))
    load(folder)
    edit_config(folder, num_nextn_predict_layers=0, num_mtp_layers=0)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    check_error(caught.value, folder, "does not use: model.layers")


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("gemma3", "layer_types"),
        ("qwen3_next", "layer_types"),
        ("smollm3", "no_rope_layers"),
        ("glm4_moe_lite", "mlp_layer_types"),
    ],
)
def test_what_is_said_of_each_layer_is_said_of_all(
    family: str, field: str, copy: Callable[[str], Path]
) -> None:
    """Layers that somebody has cut out, or put in, must not take the kinds of others."""
    folder = copy(family)
    whole = json.loads((folder / "config.json").read_text())[field]
    for said in (whole[:-1], [*whole, whole[0]]):
        edit_config(folder, **{field: said})
        with pytest.raises(CheckpointError) as caught:
            load_model_config(folder)
        words = field, f"{len(said)} kinds for {len(whole)} layers"
        check_error(caught.value, folder / "config.json", *words)


def test_extra_tensors_that_are_harmless(copy: Callable[[str], Path]) -> None:
    """Checkpoints may hold rotary frequencies of older checkpoints, and a head that is tied
    anyway.
    """
    folder = copy("qwen3_tied")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": embedding.clone(),
    }
    change_weights(folder, lambda weights: weights.update(extra))
    assert load(folder)[-1] == 1.0
    assert spec(folder).tie_word_embeddings


@pytest.mark.parametrize("said", [True, "absent"])
def test_a_head_that_was_trained_apart_counts(
    said: bool | str, copy: Callable[[str], Path]
) -> None:
    """Whatever config.json says, and as transformers has it."""
    folder = copy("smollm3")
    head = torch.randn(load_model_config(folder).vocab_size, 64)
    change_weights(folder, lambda weights: weights.update({"lm_head.weight": head}))
    edit_config(folder, tie_word_embeddings=said)
    assert not spec(folder).tie_word_embeddings
    prompt = prompts()[1]
    [found] = make_paged_model(folder, ParallelGroup(0, 1)).prefill([prompt], len(prompt))
    expected = reference_logits(reference(folder), prompt)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def test_a_tied_pair_may_be_stored_as_the_head(copy: Callable[[str], Path]) -> None:
    """Transformers takes what safetensors' `save_model` writes."""
    folder = copy("qwen3_tied")
    prompt = prompts()[1]
    expected = reference_logits(reference(folder), prompt)
    name = "model.embed_tokens.weight"
    change_weights(folder, lambda all_: all_.update({"lm_head.weight": all_.pop(name)}))
    torch.testing.assert_close(reference_logits(reference(folder), prompt), expected)
    [found] = make_paged_model(folder, ParallelGroup(0, 1)).prefill([prompt], len(prompt))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        load(folder)


def test_tensor_of_another_shape(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    name = "model.layers.0.mlp.up_proj.weight"
    change_weights(folder, lambda weights: weights.update({name: torch.ones(96, 63)}))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    check_error(caught.value, folder, name, "[96, 63]", "[96, 64]")


def test_tensor_of_integers(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    change_weights(
        folder,
        lambda weights: weights.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
    )
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    check_error(caught.value, folder, "model.norm.weight in I8", "fp32, fp16 or bf16")


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("model-*.safetensors"))
    assert len(found) > 2
    return found


def test_missing_shard(copy: Callable[[str], Path]) -> None:
    folder = copy(SHARDED)
    shards(folder)[1].unlink()
    with pytest.raises(CheckpointError) as caught:
        resolve_model(str(folder))
    check_error(caught.value, shards_name(folder, 1), "is missing")


def shards_name(folder: Path, index: int) -> Path:
    index_file = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / sorted(set(index_file["weight_map"].values()))[index]


def test_truncated_shard(copy: Callable[[str], Path]) -> None:
    folder = copy(SHARDED)
    last = shards(folder)[-1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as caught:
        resolve_model(str(folder))
    check_error(caught.value, last, "cut off")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{", "is not valid JSON"),
        ('{"weight_map": 3}', "weight_map"),
        ('{"weight_map": {"x": "../other.safetensors"}}', "not a file of the folder"),
    ],
)
def test_bad_index(content: str, word: str, copy: Callable[[str], Path]) -> None:
    folder = copy(SHARDED)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        resolve_model(str(folder))
    check_error(caught.value, folder / "model.safetensors.index.json", word)


def test_index_that_promises_too_much(copy: Callable[[str], Path]) -> None:
    folder = copy(SHARDED)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.extra"] = shards(folder)[0].name
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        resolve_model(str(folder))
    check_error(caught.value, shards(folder)[0], "lacks model.layers.9.extra")

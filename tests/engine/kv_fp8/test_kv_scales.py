"""Tests where scales of an FP8 cache come from, what they change, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import CacheConfig, EngineConfig, KVLayers, ModelConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request import Request
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.capacity import blocks_that_fit
from engine.kv_cache.group_manager import GroupManager, RequestBlocks
from engine.kv_scales import KVScaleTable
from engine.layers.kv_scales import layer_scales
from engine.layers.shard import Shard
from engine.models.checkpoint import load_model_config
from engine.models.errors import CheckpointError
from engine.models.factory import create_model
from engine.models.kv_scale_files import (
    FILE_FORMAT,
    KVCacheDtypeError,
    ScaleFile,
    choose_kv_scales,
    is_kv_scale,
)
from engine.models.loader import load_weights
from engine.node.status import fingerprint
from engine.parallel.distributed import ParallelGroup
from engine.parallel.place import ParallelPlace
from engine.quantization import Quantization
from engine.worker.memory.kv_cache import describe_capacity
from kv_transfer.errors import HandshakeMismatch
from kv_transfer.group_sizes import in_fp8
from kv_transfer.memory.pool.slot_memory import NAME_BYTES
from kv_transfer.planes import Plane
from prefill_node.config import PrefillNodeSettings
from tests.engine.models.reference_models import FAMILIES, save_checkpoint

LAYER = "model.layers.{}.self_attn."


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save_checkpoint(FAMILIES["llama"], folder)
    return folder


def with_tensors(plain: Path, folder: Path, tensors: dict[str, torch.Tensor]) -> ModelConfig:
    """Returns the checkpoint with more tensors."""
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((plain / name).read_bytes())
    save_file({**load_file(plain / "model.safetensors"), **tensors}, folder / "model.safetensors")
    return load_model_config(folder)


@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_scale", "v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
        ("kv_scale", "kv_scale"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scales_of_the_checkpoint_by_every_name(
    k_name: str, v_name: str, dtype: torch.dtype, plain: Path, tmp_path: Path
) -> None:
    """Layer 1 has none: its are 1.0. The model loads with them, whatever its cache is."""
    tensors = {}
    for layer in (0, 2):
        tensors[LAYER.format(layer) + v_name] = torch.tensor([0.5 + layer], dtype=dtype)
        tensors[LAYER.format(layer) + k_name] = torch.tensor(
            0.5 + layer if k_name == v_name else 0.25 + layer, dtype=dtype
        )
    model = with_tensors(plain, tmp_path, tensors)
    table = choose_kv_scales(model, "fp8")
    assert table is not None
    assert table.v == ((0.5,), (1.0,), (2.5,))
    assert table.k == (table.v if k_name == v_name else ((0.25,), (1.0,), (2.25,)))
    assert "checkpoint, for 2 of 3 layers" in table.source
    assert choose_kv_scales(model, "auto") is None
    config = EngineConfig(engine_id="e", epoch=1, model=model)
    place = ParallelPlace(range(model.num_layers), ParallelGroup(0, 1))
    load_weights(create_model(config, place, "cpu"), config, lambda fraction: None)


def test_better_names_win_and_others_are_left(plain: Path, tmp_path: Path) -> None:
    names = ["k_proj.output_scale", "k_proj.k_scale", "attn.q_scale", "attn.prob_scale"]
    tensors = {LAYER.format(0) + name: torch.tensor(2.0 + i) for i, name in enumerate(names)}
    assert all(map(is_kv_scale, tensors))
    table = choose_kv_scales(with_tensors(plain, tmp_path, tensors), "fp8_e4m3")
    assert table is not None and table.k[0] == (3.0,) and table.v[0] == (1.0,)
    for name in ("model.layers.0.self_attn.k_proj.weight_scale", "model.layers.0.mlp.k_scale"):
        assert not is_kv_scale(name)


def test_a_scale_for_each_head_goes_to_the_rank_that_has_it(plain: Path, tmp_path: Path) -> None:
    scales = torch.tensor([[[0.5]], [[0.75]]])
    model = with_tensors(plain, tmp_path, {LAYER.format(1) + "k_scale": scales})
    table = choose_kv_scales(model, "fp8")
    assert table is not None and table.k[1] == (0.5, 0.75)

    class Rank:
        def __init__(self, rank: int, size: int) -> None:
            self.rank, self.size = rank, size

    for rank, size, expected in ((0, 1, [0.5, 0.75]), (1, 2, [0.75]), (1, 4, [0.5])):
        place = ParallelPlace(range(3), Rank(rank, size))  # type: ignore[arg-type]
        of_rank = layer_scales(table, 1, 2, Shard(place, torch.float32, torch.device("cpu")))
        assert of_rank is not None
        assert of_rank.k.tolist() == expected
        assert of_rank.v.tolist() == [1.0] * len(expected)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), [1.0, 1.0, 1.0]])
def test_what_is_no_scale_is_refused(scale: object, plain: Path, tmp_path: Path) -> None:
    model = with_tensors(plain, tmp_path, {LAYER.format(0) + "k_scale": torch.tensor(scale)})
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_scale"):
        choose_kv_scales(model, "fp8")


def test_without_scales_it_is_said(plain: Path) -> None:
    model = load_model_config(plain)
    table = choose_kv_scales(model, "fp8")
    assert table is not None and table.digest == "1.0"
    config = EngineConfig(
        engine_id="e", epoch=1, model=model, cache=CacheConfig(kv_scales=table, num_blocks=9)
    )
    assert "FP8 (e4m3), scales 1.0, as the checkpoint has none" in describe_capacity(config, 9)


def test_auto_follows_the_checkpoint(plain: Path) -> None:
    model = replace(
        load_model_config(plain), quantization=Quantization(method="m", rules=(), kv_cache="fp8")
    )
    assert choose_kv_scales(model, "auto") is not None
    assert choose_kv_scales(replace(model, dtype="bfloat16"), "bfloat16") is None
    with pytest.raises(KVCacheDtypeError, match="--kv-cache-dtype bfloat16.*float32"):
        choose_kv_scales(model, "bfloat16")


def test_latents_have_one_scale(plain: Path, tmp_path: Path) -> None:
    """Their keys are their values: one for each head means nothing."""
    latent = KVLayers(layers=(0, 1, 2), planes=(Plane("latent", 1, 64, replicated=True),))
    scales = {LAYER.format(0) + "attn.k_scale": torch.tensor([0.5])}
    model = replace(with_tensors(plain, tmp_path, scales), kv_layers=(latent,))
    table = choose_kv_scales(model, "fp8")
    assert table is not None and table.k[0] == (0.5,)
    scales = {LAYER.format(0) + "attn.k_scale": torch.tensor([0.5, 0.5])}
    model = replace(with_tensors(plain, tmp_path, scales), kv_layers=(latent,))
    with pytest.raises(CheckpointError, match="2 scales"):
        choose_kv_scales(model, "fp8")


def test_a_file_of_scales(plain: Path, tmp_path: Path) -> None:
    model, path = load_model_config(plain), tmp_path / "scales.json"
    found = ScaleFile(
        format=FILE_FORMAT,
        model_hash=model.model_hash,
        k=[[0.5, 0.25], [1.0], [2.0]],
        v=[[3.0]] * 3,
    )
    path.write_bytes(msgspec.json.encode(found))
    table = choose_kv_scales(model, "fp8", path)
    assert table is not None and table.of_layer(0, 2) == ((0.5, 0.25), (3.0, 3.0))
    with pytest.raises(KVCacheDtypeError, match="--kv-cache-scales"):
        choose_kv_scales(model, "auto", path)
    for change, fault in (
        ({"model_hash": "other"}, "another checkpoint"),
        ({"k": [[1.0]]}, "3 layers"),
        ({"v": [[1.0], [0.0], [1.0]]}, "layer 1"),
        ({"format": "2"}, "format"),
    ):
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, **change)))
        with pytest.raises(CheckpointError, match=fault):
            choose_kv_scales(model, "fp8", path)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match="holds no scales"):
        choose_kv_scales(model, "fp8", path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        choose_kv_scales(model, "fp8", tmp_path / "missing")


def test_digests_tell_scales_apart_and_not_how_they_are_written() -> None:
    table = KVScaleTable(k=((0.5, 0.5), (2.0,)), v=((1.0,), (1.0,)), source="a")
    same = KVScaleTable(k=((0.5,), (2.0, 2.0)), v=((1.0, 1.0), (1.0,)), source="b")
    swapped = KVScaleTable(k=table.v, v=table.k)
    assert table.digest == same.digest != swapped.digest
    assert KVScaleTable(k=((1.0,),), v=((1.0, 1.0),)).digest == KVScaleTable().digest == "1.0"


def configs(plain: Path) -> tuple[EngineConfig, EngineConfig]:
    """Returns the model in bfloat16, unquantised and in FP8."""
    model = load_model_config(plain, dtype="bfloat16")
    config = EngineConfig(engine_id="e", epoch=1, model=model)
    return config, replace(config, cache=replace(config.cache, kv_scales=KVScaleTable()))


def test_twice_the_tokens_fit_the_same_bytes(plain: Path) -> None:
    half, fp8 = configs(plain)
    budget = 5 * half.kv_layout.block_bytes
    assert blocks_that_fit(half, budget) == 5
    assert blocks_that_fit(fp8, budget) == 10


def test_nodes_tell_their_caches_apart(plain: Path) -> None:
    half, fp8 = (config.kv_layout for config in configs(plain))
    other = msgspec.structs.replace(
        fp8, groups=tuple(msgspec.structs.replace(g, scales="abc") for g in fp8.groups)
    )
    assert len({fingerprint(layout) for layout in (half, fp8, other)}) == 3
    for layout, field in ((half, "groups[0].dtype"), (other, "groups[0].scales")):
        with pytest.raises(HandshakeMismatch) as caught:
            fp8.check_compatible(layout)
        assert caught.value.field == field


def test_states_keep_their_dtype(plain: Path) -> None:
    (group,) = configs(plain)[0].kv_layout.groups
    state = msgspec.structs.replace(group, block_size=1 << 30)
    assert state.is_state and in_fp8(state, "1.0") == state
    assert [plane.row_bytes for plane in in_fp8(group, "1.0").planes] == [16, 16]


def test_blocks_of_other_formats_have_other_names(plain: Path) -> None:
    pool = BlockPool(4, enable_caching=True)
    half, fp8 = (config.kv_layout.groups[0] for config in configs(plain))
    other = msgspec.structs.replace(fp8, scales="abc")
    spec = RequestSpec(list(range(16)), SamplingParams())
    request = Request(EngineCoreRequest(request_id="asked", spec=spec))
    GroupManager(0, fp8, pool).confirm(request, RequestBlocks([pool.get_new_blocks(1)], [0]), 16)
    found = [GroupManager(0, g, pool).find_cached(request, 16, None) for g in (half, fp8, other)]
    assert [num_tokens for _, num_tokens in found] == [0, 16, 0]
    names = [GroupManager(3, group, pool).names(request, 16)[0] for group in (half, fp8, other)]
    assert len(set(names)) == 3 and max(map(len, names)) <= NAME_BYTES, "a tier would cut them"


def test_settings_name_what_they_refuse(capsys: pytest.CaptureFixture[str], plain: Path) -> None:
    arguments = ["--model", str(plain), "--load-format", "dummy", "--kv-cache-dtype"]
    settings = PrefillNodeSettings.from_args("prefill", [*arguments, "fp8"])
    cache = settings.to_engine_config("kv_producer").cache
    assert cache.kv_scales is not None and cache.kv_scales.digest == "1.0"
    for name, said in (("fp8_e5m2", "choose fp8, which is e4m3"), ("int8", "fp8_e4m3")):
        with pytest.raises(SystemExit):
            PrefillNodeSettings.from_args("prefill", [*arguments, name])
        assert said in capsys.readouterr().err

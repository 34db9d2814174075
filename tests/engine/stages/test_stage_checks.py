"""Checks that what stages cannot do is refused by name, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_node.config import DecodeNodeSettings
from engine.config import (
    DraftModel,
    EngineConfig,
    InspectionConfig,
    KVLayers,
    SpeculativeConfig,
)
from engine.lora import LoRAConfig
from engine.node.settings.engine_settings import SettingsError
from engine.node.settings.stage_checks import check_stages
from kv_transfer.planes import Plane
from prefill_node.config import PrefillNodeSettings
from tests.engine.sched.rows.test_images import VISION
from tests.engine.stages.test_stages import NUM_LAYERS, stage_config
from tests.engine.tiny_model import tiny_model

PLANES = (Plane("k", 2, 32), Plane("v", 2, 32))


def with_a_drafter(config: EngineConfig) -> EngineConfig:
    draft = DraftModel(model=tiny_model(num_layers=1), vocab_size=211)
    speculative = SpeculativeConfig(
        method="eagle",
        num_speculative_tokens=1,
        prompt_lookup_max=1,
        prompt_lookup_min=1,
        draft=draft,
    )
    return replace(config, speculative=speculative)


def sharing_prefixes(config: EngineConfig) -> EngineConfig:
    assert config.kv_transfer is not None
    return replace(config, kv_transfer=replace(config.kv_transfer, shares_prefixes=True))


PREFILL = stage_config(2, role="kv_producer")
WINDOW = (
    KVLayers(layers=(0, 1, 2, 3), planes=PLANES),
    KVLayers(layers=(4,), planes=PLANES, window=16),
)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (stage_config(2, role="kv_consumer"), "for prefill nodes"),
        (stage_config(NUM_LAYERS + 1, role="kv_producer"), "more than the model has layers"),
        (stage_config(2, role="kv_producer", kv_layers=WINDOW), "stage 0 would have no layer"),
        (with_a_drafter(PREFILL), "--speculative-config"),
        (replace(PREFILL, lora=LoRAConfig()), "--enable-lora"),
        (
            replace(PREFILL, parallel=replace(PREFILL.parallel, data_parallel_size=2)),
            "--data-parallel-size",
        ),
        (replace(PREFILL, model=replace(PREFILL.model, vision=VISION)), "a model that sees images"),
        (
            replace(PREFILL, inspection=InspectionConfig(enable_mfu_metrics=True)),
            "--enable-mfu-metrics",
        ),
    ],
)
def test_what_stages_cannot_do_is_named(config: EngineConfig, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_stages(config)


def test_everything_else_is_let_through() -> None:
    check_stages(PREFILL)
    check_stages(sharing_prefixes(PREFILL))
    check_stages(with_a_drafter(stage_config(1)))


def test_settings_are_checked_before_a_checkpoint_is_read() -> None:
    flags = ["--model", "nowhere", "--pipeline-parallel-size", "2", "--tensor-parallel-size", "2"]
    prefill = PrefillNodeSettings.from_args("x", flags)
    assert prefill.print_checked("kv_producer") == 0
    assert prefill._parallel_config().num_ranks == 4
    ports = PrefillNodeSettings.from_args(
        "x", [*flags, "--kv-port", "65533", "--kv-processes", "1"]
    )
    with pytest.raises(SettingsError, match="needs ports up to 65536"):
        ports._kv_transfer_config("kv_producer", is_check=True)
    assert DecodeNodeSettings.from_args("x", flags).print_checked("kv_consumer") == 2
    groups = PrefillNodeSettings.from_args("x", [*flags, "--data-parallel-size", "2"])
    assert groups.print_checked("kv_producer") == 2

"""Tests what settings of adapters take, from a command line too, and what they refuse by name."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from bench.engine.models.shapes import shape_config
from edge.command_line import SettingsError, parse_settings
from engine.models.adapters.adapter_files import AdapterError
from engine.node.settings import adapter_settings
from engine.node.settings.adapter_settings import AdapterSettings
from prefill_node.config import PrefillNodeSettings

CONFIG = shape_config("tiny", device="cpu")


@pytest.mark.parametrize("given", [64, "64"])
def test_a_rank_is_a_number_of_the_list_wherever_it_is_written(given: int | str) -> None:
    settings = AdapterSettings.model_validate({"enable_lora": True, "max_lora_rank": given})
    lora = settings.with_lora(CONFIG).lora
    assert lora is not None
    assert lora.max_lora_rank == 64
    for wrong in (63, "63", "many"):
        with pytest.raises(ValidationError, match="8, 16, 32, 64, 128 or 256"):
            AdapterSettings.model_validate({"max_lora_rank": wrong})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora_modules": ("a=/a",)}, "--lora-modules has no effect without --enable-lora"),
        ({"lora_dir": "/a"}, "--lora-dir has no effect"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}, "--max-cpu-loras is 2"),
        ({"enable_lora": True, "lora_modules": ("a",)}, "must be NAME=FOLDER"),
        ({"enable_lora": True, "lora_modules": ('{"name": "a"}',)}, "needs a name and a path"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        AdapterSettings.model_validate(settings).with_lora(CONFIG)


def test_stages_have_no_adapters() -> None:
    config = replace(CONFIG, parallel=replace(CONFIG.parallel, pipeline_parallel_size=2))
    with pytest.raises(SettingsError, match="--pipeline-parallel-size"):
        AdapterSettings(enable_lora=True).with_lora(config)


@pytest.mark.parametrize(
    "given",
    [
        ["--lora-modules", "a=/a", "b=/b", "--max-loras", "2"],
        ["--lora-modules", "a=/a", "--max-loras", "2", "--lora-modules", "b=/b"],
        ["--max-loras=2", "--lora-modules=a=/a,b=/b"],
        ["--max-loras=2", "--lora-modules", "a=/a", "b=/b"],
    ],
)
def test_several_adapters_are_named_in_any_way(given: list[str]) -> None:
    """Peers take them one behind the other."""
    settings = parse_settings(PrefillNodeSettings, "node", ["--model", "m", *given])
    assert (settings.lora_modules, settings.max_loras) == (("a=/a", "b=/b"), 2)


def test_adapters_are_read_several_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is hashed at 270 MB/s, and there may be hundreds."""
    both = threading.Barrier(2, timeout=60)

    def read(path: str, max_rank: int) -> SimpleNamespace:
        both.wait()
        return SimpleNamespace(digest=path[-1] * 64)

    monkeypatch.setattr(adapter_settings, "read_adapter", read)
    monkeypatch.setattr(adapter_settings, "_MOST_READERS", 2)
    names = ("poet", "bard", "muse", "sage")
    settings = AdapterSettings(
        enable_lora=True, lora_modules=tuple(f"{name}=/{i}" for i, name in enumerate(names))
    )
    lora = settings.with_lora(CONFIG).lora
    assert lora is not None
    assert [(one.name, one.path, one.digest[0]) for one in lora.modules] == [
        (name, f"/{i}", str(i)) for i, name in enumerate(names)
    ]


def test_the_first_adapter_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    modules = tuple(f"lora-{i}={tmp_path / str(i)}" for i in range(40))
    with pytest.raises(AdapterError, match=f"{tmp_path / '0'}/"):
        AdapterSettings(enable_lora=True, lora_modules=modules).with_lora(CONFIG)

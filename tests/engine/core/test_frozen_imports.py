"""Processes that run steps leave what they imported out of garbage collections."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from engine.core import core_proc
from engine.executor import worker_proc


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(
    ("module", "process"), [(core_proc, "EngineCoreProc"), (worker_proc, "WorkerProc")]
)
def test_imports_are_frozen_before_a_process_runs(
    module: ModuleType, process: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = []

    class Process:
        def __init__(self, config: object) -> None:
            pass

        def run(self) -> int:
            frozen.append(gc.get_freeze_count())
            return 0

    monkeypatch.setattr(module, process, Process)
    anything: Any = type("Config", (), {"__getattr__": lambda self, name: self})()
    monkeypatch.setattr(module, "read_config", lambda kind: anything)
    monkeypatch.setattr(module, "setup_logging", lambda *args, **more: None)
    try:
        module.main()
    except SystemExit as end:
        assert end.code == 0
    assert frozen[0] > 10_000

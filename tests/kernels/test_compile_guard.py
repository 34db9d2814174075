"""The guard against kernels that are compiled while somebody waits."""

from __future__ import annotations

import logging

import pytest

from tandem_kernels.compile_guard import CompileGuard

knobs = pytest.importorskip("triton").knobs


def test_lists_and_logs_what_is_compiled_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **d: heard.append(d["repr"]))
    guard = CompileGuard()
    with caplog.at_level(logging.WARNING):
        knobs.runtime.jit_post_compile_hook(repr="early", key="")
        guard.start()
        knobs.runtime.jit_post_compile_hook(repr="rms_norm_kernel(BLOCK=64)", key="")
        guard.stop()
        knobs.runtime.jit_post_compile_hook(repr="afterwards", key="")
    assert guard.late == ["rms_norm_kernel(BLOCK=64)"]
    assert heard == ["early", "rms_norm_kernel(BLOCK=64)", "afterwards"]
    assert "rms_norm_kernel" in caplog.text and "early" not in caplog.text

"""Kernels on a time line become figures of a step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tandem_kernels
from bench.engine.timing.step_breakdown import kernel_times

KERNELS = Path(tandem_kernels.__file__).parent
FIRST, LAST = "prepare_inputs_kernel", "post_update_kernel"
STEP = [
    (0.0, 10.0, FIRST),
    (11.0, 111.0, "nvjet_gemm"),
    (101.0, 131.0, "decode_attention_kernel"),  # Launched early: it waited until 111.
    (131.0, 141.0, LAST),
]
COPIES = [(143.0, 145.0, "Memcpy DtoH"), (148.0, 150.0, "Memcpy HtoD")]
PERIOD = 154.0


def events(num_steps: int) -> list[tuple[float, float, str]]:
    return [
        (start + step * PERIOD, stop + step * PERIOD, name)
        for step in range(num_steps)
        for start, stop, name in STEP + COPIES
    ]


def test_a_kernel_that_waits_is_not_counted_twice() -> None:
    figures = kernel_times(events(4)).per_step()
    assert figures["gemm_ms"] == 0.1
    assert figures["attention_ms"] == 0.02
    assert figures["kernels"] == 6
    total = sum(figures[name] for name in ("gemm_ms", "attention_ms", "other_ms", "gaps_ms"))
    assert abs(total - figures["gpu_ms"]) < 0.002


def test_idle_time_between_steps_leaves_copies_out() -> None:
    times = kernel_times(events(4))
    assert times.between_steps == [2.0 + 3.0 + 4.0] * 3
    assert times.per_step()["between_steps_us"] == 9.0
    assert times.per_step()["largest_gap_us"] == 4.0


def test_gemms_that_do_more_are_gemms() -> None:
    names = ["small_m_qkv_kernel", "fused_gate_up_kernel", "rms_norm_kernel"]
    figures = kernel_times([(i * 10.0, i * 10.0 + 10, name) for i, name in enumerate(names)])
    assert figures.per_step()["gemm_ms"] == 0.02


def test_nothing_was_seen() -> None:
    assert kernel_times([]).per_step()["gpu_ms"] == 0.0


@pytest.mark.parametrize(
    ("folder", "kind", "others"),
    [
        ("gemm", "gemm_ms", r"quantise|_fp8_kernel|scale_product"),
        ("experts", "gemm_ms", r"pairs_kernel|norm_kernel|tiles_kernel|quantise|route_tokens"),
        ("lora", "gemm_ms", "lora_slots"),
        (
            "attention",
            "attention_ms",
            r"cache|gather|rotate|select|slots|blocks|bits|scores|sinks|close|index|attended",
        ),
    ],
)
def test_own_kernels_count_as_what_they_compute(folder: str, kind: str, others: str) -> None:
    """All of a folder but those that prepare, choose or move."""
    files = sorted((KERNELS / folder).rglob("*.py"))
    names = [name for file in files for name in re.findall(r"def (\w+_kernel)\(", file.read_text())]
    assert len(names) > 4
    for name in names:
        figures = kernel_times([(0.0, 1000.0, name)]).per_step()
        assert (figures[kind] == 1.0) != bool(re.search(others, name)), name

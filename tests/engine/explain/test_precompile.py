"""Tests that kernels which are compiled ahead are those that launches look for."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.engine.models.shapes import shape_config
from engine.contracts.sampling_params import everything
from engine.explain import kernel_keys, precompile
from engine.explain.launched_kernels import Compilation, KernelKey, keeping
from engine.explain.launching_runner import launching_runner
from engine.worker.dummy_steps import DummyStep
from tandem_kernels import ops
from tandem_kernels.device import KNOWN_GPUS, as_on

pytest.importorskip("triton")

H200 = KNOWN_GPUS["h200"]


def test_a_launch_finds_what_was_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    hits: list[bool] = []
    kept: list[Compilation] = []
    # The knob would set the variable as well, and leave it so.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit)
    )
    table, ids = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int32)
    with as_on(H200), keeping(H200, kept.append):
        for _ in range(2):
            ops.embedding.kernel(ids, table)
    first, second = kept
    assert first.key == second.key
    first.compile()
    second.compile()
    assert hits == [False, True]


def test_steps_of_a_runner_launch_what_is_around_the_model() -> None:
    config = shape_config(
        "tiny-experts", num_layers=1, max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64
    )
    found: set[str] = set()
    with (
        as_on(H200),
        keeping(H200, lambda one: found.add(one.key.kernel)),
        launching_runner(config) as run,
    ):
        run(DummyStep([1, 9], everything(num_logprobs=2)))
    assert found >= {
        "apply_penalties_kernel",
        "filter_floor_kernel",
        "logprobs_kernel",
        "mask_logits_kernel",
        "pick_parameters_kernel",
        "post_update_kernel",
        "prepare_inputs_kernel",
        "row_argmax_kernel",
    }


def test_children_compile_each_kernel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = shape_config(
        "tiny-experts", num_layers=1, max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64
    )
    steps = kernel_keys.steps_before_ready(config)[:3]
    monkeypatch.setattr(kernel_keys, "steps_before_ready", lambda config: steps)
    batches = kernel_keys.warm_up_batches(config)[:4]
    monkeypatch.setattr(kernel_keys, "warm_up_batches", lambda config: batches)

    def compiled(one: Compilation) -> None:
        with (tmp_path / one.key.kernel).open("a") as file:
            file.write(f"{one.key.arguments} {one.key.options}\n")
        if one.key.kernel == "post_update_kernel":
            raise RuntimeError("not this one")

    monkeypatch.setattr(Compilation, "compile", compiled)
    count, failed = precompile.compile_ahead(config, H200, has_flash=True, num_processes=3)
    lines = [line for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert count == len(lines) == len(set(lines)) > 20
    assert failed == len((tmp_path / "post_update_kernel").read_text().splitlines()) > 0
    assert {"rms_norm_kernel", "block_argmax_kernel"} <= {path.name for path in tmp_path.iterdir()}


def test_children_get_about_as_many_kernels_each() -> None:
    def key(name: str) -> KernelKey:
        return KernelKey(name, "", "")

    common = {key(name) for name in "abcdef"}
    shares: list[list[Any]] = precompile.shared_out([common | {key("own")}, common, set()])
    assert sorted(map(len, shares)) == [0, 3, 4]
    assert sorted(itertools.chain(*shares)) == sorted(common | {key("own")})

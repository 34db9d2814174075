"""Tests which operation computes each part of a model, by rows, dtype, shape and policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from engine.config import DeviceConfig, EngineConfig
from engine.layers.attention.paged import PagedBackend
from engine.layers.feed_forward.router import Router, RouterOptions
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from engine.layers.methods.base import ColumnPart, LinearLayer
from engine.layers.shard import Shard
from engine.models.base import CausalLM, ForwardInputs, GroupInputs
from engine.models.decoder.decoder import Decoder
from engine.models.registry import spec_of
from engine.parallel.place import ParallelPlace
from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.device import KNOWN_GPUS, GpuFacts, as_on
from tests.engine.tiny_model import tiny_model

CPU = torch.device("cpu")
LAYERS = 2
OWN = GemmPolicy(small_m_rows=16, fused_gate_up_rows=40, residual_rows=48)
NEW = GemmPolicy(small_m_rows=16, residual_rows=48, few_rows=8, adds_few_rows=True)
HEADS = replace(NEW, few_row_heads=4, small_m_heads=20)
EXACT = GemmPolicy(deterministic=True)
_RECORDED = (
    "rms_norm", "fused_add_rms_norm", "small_m_gemm", "few_row_gemm", "invariant_gemm",
    "small_m_gate_up", "fused_gate_up", "silu_and_mul", "rope_and_cache", "few_row_qkv",
    "small_m_qkv",
)  # fmt: skip


def steps_of(qkv: str, gate_up: str, row: str, head: str) -> list[str]:
    """Returns what a model does: each part is one operation, or several behind each other."""
    norm = "rms_norm" if row in ("addmm_", "few_row_gemm") else "fused_add_rms_norm"
    attention = [qkv, "rope_and_cache", row, norm]
    return ["rms_norm", *[*attention, *gate_up.split(), row, norm] * LAYERS, head]


LIBRARY = steps_of("linear", "linear silu_and_mul", "linear", "linear")
FEW = steps_of("small_m_gemm", "small_m_gate_up", "linear", "linear")
FEW_HEAD = [*FEW[:-1], "few_row_gemm"]
FEW_OUTPUTS = steps_of("small_m_gemm", "small_m_gate_up", "few_row_gemm", "few_row_gemm")
ANY_SIZE = steps_of("few_row_gemm", "linear silu_and_mul", "few_row_gemm", "few_row_gemm")
ONE_FRONT = [
    *["few_row_qkv", "few_row_gemm", "rms_norm", "linear", "silu_and_mul", "few_row_gemm"] * LAYERS,
    "rms_norm",
    "few_row_gemm",
]
HEADS_FEW_OUTPUTS, HEADS_LIBRARY = (
    [
        "small_m_qkv" if step == "rope_and_cache" else step
        for step, behind in pairwise([*steps, ""])
        if behind != "rope_and_cache"
    ]
    for steps in (FEW_OUTPUTS, LIBRARY)
)
FUSED = steps_of("linear", "fused_gate_up", "linear", "linear")
MANY = steps_of("linear", "fused_gate_up", "addmm_", "linear")
MANY_APART = steps_of("linear", "linear silu_and_mul", "addmm_", "linear")
INVARIANT = steps_of(
    "invariant_gemm", "invariant_gemm silu_and_mul", "invariant_gemm", "invariant_gemm"
)


@pytest.mark.parametrize(
    ("policy", "dtype", "size", "expected"),
    [
        (GemmPolicy(), "bfloat16", 256, {1: LIBRARY, 16: LIBRARY, 48: LIBRARY}),
        (
            OWN,
            "bfloat16",
            256,
            {1: FEW, 16: FEW, 17: LIBRARY, 39: LIBRARY, 40: FUSED, 47: FUSED, 48: MANY},
        ),
        (OWN, "float32", 256, {1: LIBRARY, 16: LIBRARY, 40: LIBRARY, 48: MANY_APART}),
        (OWN, "bfloat16", 128, {1: LIBRARY, 16: LIBRARY, 40: LIBRARY, 48: MANY_APART}),
        (NEW, "bfloat16", 256, {4: FEW_OUTPUTS, 8: FEW_HEAD, 9: FEW, 48: MANY_APART}),
        (NEW, "bfloat16", 128, {8: ANY_SIZE, 9: LIBRARY}),
        (NEW, "float32", 128, {8: LIBRARY}),
        (HEADS, "bfloat16", 256, {4: HEADS_FEW_OUTPUTS, 20: HEADS_LIBRARY, 21: LIBRARY}),
        (HEADS, "bfloat16", 128, {4: ONE_FRONT, 5: ANY_SIZE}),
        (HEADS, "float32", 128, {4: LIBRARY}),
        (EXACT, "bfloat16", 256, {1: INVARIANT, 16: INVARIANT, 40: INVARIANT, 48: INVARIANT}),
    ],
)
def test_each_shape_has_its_operation(
    policy: GemmPolicy, dtype: str, size: int, expected: dict[int, list[str]]
) -> None:
    """The kernels take sizes that are multiples of 256, in half precision."""
    model = _model(policy, dtype, size)
    assert {rows: _operations(model, dtype, size, rows) for rows in expected} == expected


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_the_policy_follows_device_and_settings(capability: tuple[int, int]) -> None:
    gpu = GpuFacts("a GPU", capability, 132)

    def choose(
        tp_size: int = 1, dtype: torch.dtype = torch.bfloat16, **settings: Any
    ) -> GemmPolicy:
        with as_on(gpu):
            return GemmPolicy.choose(DeviceConfig(device="cuda", **settings), CPU, tp_size, dtype)

    small_m = 16 if capability >= (9, 0) else 0
    gate_up = 1024 if capability[0] == 9 else 0
    fp8 = capability[0] == 9
    assert choose() == GemmPolicy(
        False, small_m, gate_up, 1024, 256, fp8, 512, few_rows=small_m, adds_few_rows=small_m > 0,
        few_row_heads=8 if small_m else 0, fused_router_rows=8 if small_m else 0,
        fused_qkv_rows=4 * gate_up, int8=fp8, int8_rows=64, fp4_rows=256,
        small_m_wide_rows=4 * small_m, small_m_heads=4 * small_m,
    )  # fmt: skip
    four = GemmPolicy(
        False, small_m, gate_up, 0, 256, fp8, 512, few_rows=small_m,
        few_row_heads=8 if small_m else 0, fused_qkv_rows=4 * gate_up, int8=fp8, int8_rows=64,
        fp4_rows=256, small_m_wide_rows=4 * small_m, small_m_heads=4 * small_m,
    )  # fmt: skip
    assert choose(tp_size=4) == four
    two = replace(four, shared_residual_rows=1024)
    assert choose(tp_size=2) == two
    assert choose(tp_size=2, disabled_fast_paths=("residual-gemm",)) == four
    assert not choose(dtype=torch.float16).fp8
    assert choose(deterministic=True) == GemmPolicy(deterministic=True, int4_rows=256, fp4_rows=256)
    for path, field in (
        ("small-m-gemm", "small_m_rows"),
        ("small-m-gemm", "small_m_wide_rows"),
        ("small-m-gemm", "small_m_heads"),
        ("few-row-gemm", "few_rows"),
        ("few-row-qkv", "few_row_heads"),
        ("fused-router", "fused_router_rows"),
        ("fused-qkv", "fused_qkv_rows"),
        ("fused-gate-up", "fused_gate_up_rows"),
        ("residual-gemm", "residual_rows"),
        ("fp8-gemm", "fp8"),
        ("int4-gemm", "int4_rows"),
        ("int4-gemm", "fp4_rows"),
        ("int8-gemm", "int8"),
        ("int8-gemm", "int8_rows"),
        ("side-stream", "beside_rows"),
    ):
        assert getattr(choose(disabled_fast_paths=(path,)), field) == 0
    assert GemmPolicy.choose(DeviceConfig(), CPU, 1) == GemmPolicy()
    exact = choose(dtype=torch.float32)
    assert exact.int4_rows == exact.fp4_rows == exact.int8_rows == 0


@torch.inference_mode()
@pytest.mark.parametrize(
    ("outputs", "is_row", "most"),
    [(6656, False, 16), (6656, True, 0), (8192, False, 64), (8192, True, 64), (8576, True, 0)],
)
def test_layers_whose_tiles_fill_the_sms_keep_their_kernel_for_more_rows(
    outputs: int, is_row: bool, most: int
) -> None:
    """Row layers have it there alone: with fewer tiles, some SMs would have nothing to read."""
    policy = replace(OWN, small_m_wide_rows=64)
    shard = Shard(ParallelPlace(range(1)), torch.bfloat16, CPU, policy)
    layer: LinearLayer
    if is_row:
        layer = RowParallelLinear(256, outputs, shard)
    else:
        part = ColumnPart(0, outputs, outputs)
        layer = MergedColumnParallelLinear(256, (part,), shard)
    layer.weight.zero_()
    for rows in filter(None, (most, most + 1)):
        with _recorded() as seen, as_on(KNOWN_GPUS["h200"]):
            layer(torch.zeros(rows, 256, dtype=torch.bfloat16))
        assert seen == ["small_m_gemm" if rows <= most else "linear"]


@torch.inference_mode()
def test_a_router_of_few_rows_has_its_kernel() -> None:
    """It takes what is given in half precision, and gives logits in float32."""
    torch.manual_seed(3)
    shard = Shard(ParallelPlace(range(1)), torch.bfloat16, CPU, NEW)
    router = Router(48, 6, RouterOptions(top_k=2), shard)
    router.weight.normal_()
    for rows, expected in ((8, "few_row_gemm"), (9, "linear")):
        x = torch.randn(rows, 48).bfloat16()
        with _recorded() as seen:
            weights, experts = router(x, torch.arange(rows))
        assert seen == [expected]
        scores = (x.double() @ router.weight.double().t()).softmax(-1).topk(2)
        assert torch.equal(experts.long(), scores.indices)
        shares = scores.values / scores.values.sum(-1, keepdim=True)
        torch.testing.assert_close(weights, shares.float())


def _model(policy: GemmPolicy, dtype: str, size: int) -> CausalLM:
    model = tiny_model(
        num_layers=LAYERS, hidden_size=size, intermediate_size=size, num_heads=4, num_kv_heads=2,
        head_dim=size // 4, dtype=dtype, vocab_size=64,
    )  # fmt: skip
    config = EngineConfig(engine_id="dispatch", epoch=1, model=model)
    shard = Shard(ParallelPlace(range(LAYERS)), getattr(torch, dtype), CPU, policy)
    made = Decoder(config, spec_of(model), shard).eval()
    for parameter in made.parameters():
        parameter.normal_(std=0.05)
    return made


@torch.inference_mode()
def _operations(model: CausalLM, dtype: str, size: int, rows: int) -> list[str]:
    """Returns what one prompt of `rows` tokens runs through, but for attention."""
    cache = torch.zeros(LAYERS, 4, 2, 2, 16, size // 4, dtype=getattr(torch, dtype))
    lengths = torch.tensor([0, rows]).int(), torch.tensor([rows]).int()
    metadata = AttentionMetadata(torch.arange(4).int().view(1, 4), *lengths, 0, rows, rows)
    at = torch.arange(rows)
    step = ForwardInputs(
        at.int(),
        at,
        (GroupInputs(at, metadata),),
        list(cache.unbind()),
        PagedBackend(),
        lambda layer: None,
    )
    with _recorded() as seen:
        model.compute_logits(model(step))
    return seen


@contextmanager
def _recorded() -> Iterator[list[str]]:
    """Records names of outermost calls: what an operation does inside is its own matter."""
    seen: list[str] = []
    depth = 0

    def recording(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth == 0:
                seen.append(name)
            depth += 1
            try:
                return call(*args, **kwargs)
            finally:
                depth -= 1

        return run

    with ExitStack() as patches:
        for name in _RECORDED:
            patches.enter_context(patch.object(ops, name, recording(name, getattr(ops, name))))
        patches.enter_context(patch.object(F, "linear", recording("linear", F.linear)))
        own = recording("addmm_", torch.Tensor.addmm_)
        patches.enter_context(patch.object(torch.Tensor, "addmm_", own))
        yield seen

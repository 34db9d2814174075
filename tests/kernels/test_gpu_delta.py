"""The Triton column of linear attention on a CUDA device, against float64, and in CUDA graphs."""

from __future__ import annotations

import delta_checks as check
import pending_checks
import pytest
import torch

from tandem_kernels import ops
from tandem_kernels.batch.state_metadata import StateMetadata

pytestmark = pytest.mark.gpu

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
batches = pytest.mark.parametrize("batch", [check.DECODES, check.MIXED, check.BORDERS])
SIZES = [
    check.Sizes(),
    check.Sizes(key_heads=1, value_heads=2, key_dim=128, value_dim=128),
    check.Sizes(key_heads=2, value_heads=2, key_dim=64, value_dim=96, kernel=3),
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


@dtypes
@batches
@pytest.mark.parametrize("kernel", [2, 3, 4, 8])
def test_causal_conv(dtype: torch.dtype, batch: check.Batch, kernel: int) -> None:
    sizes, op = check.Sizes(kernel=kernel), ops.causal_conv
    check.causal_conv(op, batch, sizes, dtype, "cuda")
    check.causal_conv(op, batch, sizes, dtype, "cuda", has_bias=True)
    check.causal_conv(op, batch, sizes, dtype, "cuda", activates=False)


@dtypes
@batches
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("fixed_order", [False, True])
def test_gated_delta_rule(
    dtype: torch.dtype, batch: check.Batch, sizes: check.Sizes, fixed_order: bool
) -> None:
    check.gated_delta_rule(
        ops.gated_delta_rule, batch, sizes, dtype, "cuda", fixed_order=fixed_order
    )


@dtypes
def test_a_prompt_of_equal_tokens_is_solved_as_exactly(dtype: torch.dtype) -> None:
    for sizes in SIZES:
        check.repeated_tokens(ops.gated_delta_rule, sizes, dtype, "cuda")


def test_how_a_request_is_cut_changes_no_bit() -> None:
    for sizes in SIZES:
        check.cut_anywhere(ops.gated_delta_rule, sizes, "cuda")
        for dtype in (torch.float32, torch.bfloat16):
            check.convolution_cut_anywhere(ops.causal_conv, sizes, dtype, "cuda")


@dtypes
@pytest.mark.parametrize("most", [2, 4, 7])
def test_drafts_change_no_bit_of_a_state(dtype: torch.dtype, most: int) -> None:
    given = ops.causal_conv, ops.gated_delta_rule
    for sizes in SIZES:
        pending_checks.drafts(*given, sizes, dtype, "cuda", most=most)
        tolerance = check.TOLERANCE[dtype]
        pending_checks.drafts(
            *given, sizes, dtype, "cuda", most=most, fixed_order=False, tolerance=tolerance
        )


@dtypes
@pytest.mark.parametrize("rows", [1, 37, 2049])
def test_gates(dtype: torch.dtype, rows: int) -> None:
    check.gated_rms_norm(ops.gated_rms_norm, rows, 32, 128, dtype, "cuda")
    check.gated_rms_norm(ops.gated_rms_norm, rows, 3, 96, dtype, "cuda")
    check.gate_and_mul(ops.sigmoid_and_mul, ops.softplus_and_mul, rows, 4096, dtype, "cuda")


def test_a_graph_computes_whatever_its_tensors_say() -> None:
    """Recorded with padding alone, replayed with requests of all lengths that fit."""
    sizes, tokens, requests = SIZES[1], 256, 8
    batch = check.Batch((1, 3, 64, 70, 0, 0, 0, 0), (4, 0, 9, 0, 0, 0, 0, 0))
    layer = check.Layer.random(batch, sizes, torch.bfloat16, "cuda")
    expected = layer.check(ops.gated_delta_rule, widen=1.0).clone()
    count = sum(batch.lengths)
    after = layer.states.clone()

    mixed = torch.zeros(tokens, sizes.channels, dtype=torch.bfloat16, device="cuda")
    gates = torch.zeros(tokens, 2 * sizes.value_heads, dtype=torch.bfloat16, device="cuda")
    metadata = StateMetadata(
        torch.zeros(requests, dtype=torch.int32, device="cuda"),
        torch.zeros(requests + 1, dtype=torch.int32, device="cuda"),
        torch.zeros(requests, dtype=torch.int32, device="cuda"),
        0,
    )
    states = torch.randn_like(after)
    given = mixed, gates, layer.a_log, layer.dt_bias, states, metadata
    ops.gated_delta_rule(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.gated_delta_rule(*given)
    fresh = check.Layer.random(batch, sizes, torch.bfloat16, "cuda")
    for r, _ in batch.spans():
        block = int(layer.metadata.blocks[r])
        states[block] = fresh.states[int(fresh.metadata.blocks[r])]
    mixed[:count], gates[:count] = fresh.mixed, fresh.gates
    metadata.blocks.copy_(layer.metadata.blocks)
    metadata.query_start_loc.copy_(layer.metadata.query_start_loc)
    metadata.seq_lens.copy_(layer.metadata.seq_lens)
    eager_states = states.clone()
    eager = ops.gated_delta_rule(
        fresh.mixed, fresh.gates, layer.a_log, layer.dt_bias, eager_states, layer.metadata
    )
    graph.replay()
    assert torch.equal(out[:count], eager) and not torch.equal(eager, expected)
    assert torch.equal(states.nan_to_num(), eager_states.nan_to_num())

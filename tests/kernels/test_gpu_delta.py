"""The Triton column of linear attention on a CUDA device, against float64, and in CUDA graphs."""

from __future__ import annotations

from functools import partial

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
    check.Sizes(key_heads=2, value_heads=2, key_dim=128, value_dim=128, by_channel=True),
    check.Sizes(
        key_heads=2, value_heads=2, key_dim=24, value_dim=12, by_channel=True, decay_floor=-5.0
    ),
    check.Sizes(key_heads=2, value_heads=2, key_dim=96, value_dim=192, rate_scale=2.0),
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_projections_with_their_convolution(dtype: torch.dtype, kernel: int, rows: int) -> None:
    check.few_row_conv(ops.few_row_conv, rows, kernel, dtype, "cuda", has_bias=rows > 1)


@dtypes
@batches
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 8])
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
        # With rates of 2 each token turns the state round, and behind an even number of them nearly
        # nothing is left: half precision has no digit of that.
        if sizes.rate_scale == 1.0 or dtype == torch.float32:
            check.repeated_tokens(ops.gated_delta_rule, sizes, dtype, "cuda")


@dtypes
def test_keys_have_unit_length_however_long_they_come(dtype: torch.dtype) -> None:
    for sizes in SIZES[:4]:
        check.keys_of_any_size(ops.gated_delta_rule, sizes, dtype, "cuda")


def test_how_a_request_is_cut_changes_no_bit() -> None:
    for sizes in SIZES:
        check.cut_anywhere(ops.gated_delta_rule, sizes, "cuda")
        for dtype in (torch.float32, torch.bfloat16):
            check.convolution_cut_anywhere(ops.causal_conv, sizes, dtype, "cuda")


@dtypes
@pytest.mark.parametrize("most", [2, 4, 7])
def test_drafts_change_no_bit_of_a_state(dtype: torch.dtype, most: int) -> None:
    given, tolerance = (ops.causal_conv, ops.gated_delta_rule), check.TOLERANCE[dtype]
    loose = {"fixed_order": False, "tolerance": tolerance}
    for sizes in SIZES:
        for how in ({}, loose):
            if sizes.by_channel:
                pending_checks.kda_drafts(*given, dtype, "cuda", sizes=sizes, most=most, **how)
            else:
                pending_checks.drafts(*given, sizes, dtype, "cuda", most=most, **how)


@dtypes
@pytest.mark.parametrize("rows", [1, 37, 2049])
def test_gates(dtype: torch.dtype, rows: int) -> None:
    for is_sigmoid in (False, True):
        given = rows, 32, 128, dtype, "cuda"
        check.gated_rms_norm(ops.gated_rms_norm, *given, is_sigmoid=is_sigmoid)
    check.gated_rms_norm(ops.gated_rms_norm, rows, 3, 96, dtype, "cuda")
    check.gate_and_mul(ops.sigmoid_and_mul, ops.softplus_and_mul, rows, 4096, dtype, "cuda")
    check.row_gate(ops.row_gate, rows, 2048, dtype, "cuda")


@pytest.mark.parametrize("sizes", [SIZES[1], SIZES[3]], ids=str)
def test_a_graph_computes_whatever_its_tensors_say(sizes: check.Sizes) -> None:
    """Recorded with padding alone, replayed with requests of all lengths that fit."""
    tokens, requests = 256, 8
    batch = check.Batch((1, 3, 64, 70, 0, 0, 0, 0), (4, 0, 9, 0, 0, 0, 0, 0))
    layer = check.Layer.random(batch, sizes, torch.bfloat16, "cuda")
    expected = layer.check(ops.gated_delta_rule, widen=1.0).clone()
    count = sum(batch.lengths)
    after = layer.states.clone()

    mixed = torch.zeros(tokens, sizes.channels, dtype=torch.bfloat16, device="cuda")
    gates, decays = (
        None if part is None else torch.zeros(tokens, *part.shape[1:]).to(part)
        for part in (layer.gates, layer.decays)
    )
    metadata = StateMetadata(
        torch.zeros(requests, dtype=torch.int32, device="cuda"),
        torch.zeros(requests + 1, dtype=torch.int32, device="cuda"),
        torch.zeros(requests, dtype=torch.int32, device="cuda"),
        0,
    )
    states = torch.randn_like(after)
    rule = partial(ops.gated_delta_rule, decays=decays)
    given = mixed, gates, layer.a_log, layer.dt_bias, states, metadata
    rule(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rule(*given)
    fresh = check.Layer.random(batch, sizes, torch.bfloat16, "cuda")
    for r, _ in batch.spans():
        block = int(layer.metadata.blocks[r])
        states[block] = fresh.states[int(fresh.metadata.blocks[r])]
    mixed[:count], gates[:count] = fresh.mixed, fresh.gates
    if decays is not None:
        decays[:count] = fresh.decays
    metadata.blocks.copy_(layer.metadata.blocks)
    metadata.query_start_loc.copy_(layer.metadata.query_start_loc)
    metadata.seq_lens.copy_(layer.metadata.seq_lens)
    eager_states = states.clone()
    eager = ops.gated_delta_rule(
        fresh.mixed, fresh.gates, layer.a_log, layer.dt_bias, eager_states, layer.metadata,
        decays=fresh.decays,
    )  # fmt: skip
    graph.replay()
    assert torch.equal(out[:count], eager) and not torch.equal(eager, expected)
    assert torch.equal(states.nan_to_num(), eager_states.nan_to_num())

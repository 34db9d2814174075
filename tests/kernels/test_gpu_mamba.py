"""The Triton column of Mamba 2's layers on a CUDA device, against float64, and in CUDA graphs."""

from __future__ import annotations

import delta_checks
import mamba_checks as check
import pending_checks
import pytest
import torch

from tandem_kernels import ops
from tandem_kernels.batch.state_metadata import StateMetadata

pytestmark = pytest.mark.gpu

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
LONG = delta_checks.Batch((1, 300, 127, 128, 129, 1, 511), (700, 5, 0, 9, 0, 0, 400), 1)
BATCHES = [delta_checks.DECODES, delta_checks.MIXED, delta_checks.BORDERS]
SIZES = [
    check.Sizes(),
    check.Sizes(heads=8, groups=1, size=128, head_dim=64),
    check.Sizes(heads=6, groups=2, size=64, head_dim=80),
    check.Sizes(heads=4, groups=4, size=128, head_dim=128),  # lightning attention
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


@dtypes
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("fixed_order", [False, True])
def test_mamba_scan(
    dtype: torch.dtype, batch: delta_checks.Batch, sizes: check.Sizes, fixed_order: bool
) -> None:
    check.mamba_scan(ops.mamba_scan, batch, sizes, dtype, "cuda", fixed_order=fixed_order)


@dtypes
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_long_prompts_beside_decodes(dtype: torch.dtype, sizes: check.Sizes) -> None:
    check.mamba_scan(ops.mamba_scan, LONG, sizes, dtype, "cuda")


def test_how_a_request_is_cut_changes_no_bit() -> None:
    for sizes in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            check.cut_anywhere(ops.mamba_scan, sizes, dtype, "cuda")


@dtypes
def test_drafts_change_no_bit(dtype: torch.dtype) -> None:
    sizes = delta_checks.Sizes(key_heads=1, value_heads=4, key_dim=128, value_dim=64)
    given = ops.causal_conv, ops.mamba_scan, dtype, "cuda"
    pending_checks.mamba_drafts(*given, sizes=sizes)
    tolerance = delta_checks.TOLERANCE[dtype]
    lightning = delta_checks.Sizes(key_heads=4, value_heads=4, key_dim=128, value_dim=128, kernel=1)
    pending_checks.mamba_drafts(*given, sizes=lightning)
    pending_checks.mamba_drafts(*given, sizes=sizes, fixed_order=False, tolerance=tolerance)


@dtypes
@pytest.mark.parametrize("rows", [1, 37, 2049])
def test_norm_of_gated_groups(dtype: torch.dtype, rows: int) -> None:
    norms = ops.gated_group_norm, ops.gated_square_sums
    for shape in ((8, 512), (1, 3072), (3, 96)):
        check.gated_group_norm(*norms, rows, shape, dtype, "cuda")


def test_a_graph_computes_whatever_its_tensors_say() -> None:
    """Recorded with padding alone, replayed with requests of all lengths that fit."""
    sizes, tokens, requests = SIZES[1], 256, 8
    batch = delta_checks.Batch((1, 3, 128, 70, 0, 0, 0, 0), (4, 0, 9, 0, 0, 0, 0, 0))
    fresh = check.Layer.random(batch, sizes, torch.bfloat16, "cuda")
    count, states = sum(batch.lengths), torch.randn_like(fresh.states)
    mixed = torch.zeros(tokens, sizes.channels, dtype=torch.bfloat16, device="cuda")
    steps = torch.zeros(tokens, sizes.heads, dtype=torch.bfloat16, device="cuda")
    metadata = StateMetadata(
        torch.zeros(requests, dtype=torch.int32, device="cuda"),
        torch.zeros(requests + 1, dtype=torch.int32, device="cuda"),
        torch.zeros(requests, dtype=torch.int32, device="cuda"),
        0,
    )
    given = mixed, steps, *fresh.numbers, states, metadata
    ops.mamba_scan(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.mamba_scan(*given)
    states.copy_(fresh.states)
    mixed[:count], steps[:count] = fresh.mixed, fresh.steps
    metadata.blocks.copy_(fresh.metadata.blocks)
    metadata.query_start_loc.copy_(fresh.metadata.query_start_loc)
    metadata.seq_lens.copy_(fresh.metadata.seq_lens)
    eager = fresh.call(ops.mamba_scan)
    graph.replay()
    assert torch.equal(out[:count], eager)
    assert torch.equal(states.nan_to_num(), fresh.states.nan_to_num())

"""Checks of experts with quantised weights, for any column of the dispatch table and any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernel_oracle as oracle
import torch
from fp4_checks import Form, fp4_weight
from torch import Tensor

from tandem_kernels.elementwise.gate_form import GateForm
from tandem_kernels.experts.expert_rows import ExpertRows
from tandem_kernels.experts.expert_sums import sum_pairs
from tandem_kernels.experts.expert_tuning import ExpertTuning
from tandem_kernels.experts.fp4.ahead_shapes import HEIGHT, multiplies_ahead
from tandem_kernels.experts.fp4.even_runs import fp4_even_gemm
from tandem_kernels.experts.fp4.expert_tiles import ExpertTiles
from tandem_kernels.experts.fp4.experts import fp4_expert_gemm
from tandem_kernels.experts.fp4.few_rows.experts import fp4_few_row_gate_up
from tandem_kernels.experts.fp4.few_rows.shapes import ExpertWarpTuning
from tandem_kernels.experts.fp4.pair_shapes import takes_even_runs
from tandem_kernels.experts.fp4.pairs import fp4_pair_gemm
from tandem_kernels.experts.fp8.experts import fp8_gemm
from tandem_kernels.experts.fp8.pairs import fp8_pair_gemm
from tandem_kernels.experts.fp8.sorted_rows import SortedTiles, quantise_to_places
from tandem_kernels.gemm.fp8_activations import quantise_fp8

Op = Callable[..., Any]
Sizes = tuple[int, int, int, int, int]
"""Tokens, experts of one, experts, hidden size, units of one."""

_BLOCK = 128
ROUNDED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Rounding to a dtype between and behind the projections may change so much."""
_FLIPPED = 1e-2
"""Numbers of e4m3 that become others by that may add so much."""
_QUANTISED = 8e-2
"""Factors in e4m3 may change so much in all."""


FP8_DOWN = [
    ExpertTuning(64, 64, 128, 4, 3, strips=2),
    ExpertTuning(128, 128, 128, 8, 3, strips=2),
    ExpertTuning(16, 64, 128, 4, 3),
    ExpertTuning(16, 32, 128, 2, 4),
    ExpertTuning(16, 16, 128, 1, 4),
]
FP8_PAIRS = [
    ExpertTuning(1, 2, 1024, 2, 1, each_pair=True),
    ExpertTuning(1, 4, 128, 1, 1, each_pair=True),
    ExpertTuning(1, 16, 256, 1, 1, each_pair=True),
]
FEW_ROWS = [
    ExpertTuning(16, 64, 64, 4, 3, splits=3),
    ExpertTuning(16, 128, 128, 4, 3, splits=2),
    ExpertTuning(8, 64, 64, 2, 3),
    ExpertTuning(8, 64, 128, 1, 3, splits=2),
]
MANY_ROWS = [
    ExpertTuning(32, 64, 64, 4, 3, extra_rows=16),
    ExpertTuning(16, 128, 64, 4, 3, group=2, extra_rows=32, spares_extra=True, unroll=2),
    ExpertTuning(32, 64, 64, 4, 2, extra_rows=16, spares_extra=True, unroll=3),
    ExpertTuning(32, 128, 64, 4, 3, strips=2),
    ExpertTuning(32, 128, 64, 4, 3, extra_rows=16, spares_extra=True, strips=2),
    ExpertTuning(16, 256, 64, 8, 3, strips=2),
]
HALF_LAST = [
    ExpertTuning(16, 128, 64, 4, 3, extra_rows=16, spares_extra=True),
    ExpertTuning(32, 128, 64, 4, 3, group=2),
]
"""Tiles for a number of outputs that leaves half of one in the last column."""
EACH_PAIR = [
    ExpertTuning(8, 64, 64, 2, 3, splits=3, each_pair=True),
    ExpertTuning(16, 128, 128, 4, 3, each_pair=True),
    ExpertTuning(8, 64, 128, 1, 3, splits=2, each_pair=True),
    ExpertTuning(8, 64, 64, 2, 3, splits=5, each_pair=True),
    ExpertTuning(8, 128, 64, 2, 3, splits=5, each_pair=True),
    ExpertTuning(8, 64, 64, 2, 2, splits=3, each_pair=True, late=True),
    ExpertTuning(8, 128, 64, 2, 2, splits=5, unroll=3, each_pair=True, late=True),
    ExpertTuning(8, 64, 64, 1, 2, unroll=4, each_pair=True, late=True),
]

EVEN_RUNS = [
    ExpertTuning(8, 64, 64, 2, 3, runs=1),
    ExpertTuning(8, 64, 128, 2, 3, runs=2),
    ExpertTuning(8, 128, 64, 2, 2, runs=7),
    ExpertTuning(8, 64, 64, 1, 4, runs=5),
]
"""Runs of several tiles, and of less than one."""


def tile_name(tuning: ExpertTuning) -> str:
    return f"{tuning.rows} x {tuning.cols * tuning.strips}"


def pair_name(tuning: ExpertTuning) -> str:
    late = f" late unroll={tuning.unroll}" if tuning.late else ""
    return f"cols={tuning.cols} splits={tuning.splits}{late}"


def fp8_weight(shape: tuple[int, ...], *, blocks: bool, device: str = "cpu") -> tuple[Tensor, ...]:
    """Makes (numbers [..., N, K] e4m3, scales, the same weight [..., N, K] in float64)."""
    *outer, num_outputs, num_inputs = shape
    numbers = torch.randn(shape, device=device).mul(80).clamp(-448, 448).to(torch.float8_e4m3fn)
    size = (*outer, -(-num_outputs // _BLOCK), -(-num_inputs // _BLOCK))
    scales = torch.rand(size if blocks else (*outer, num_outputs), device=device) + 0.2
    scales *= num_inputs**-0.5 / 80
    spread = scales.double()
    for dim in (-1, -2) if blocks else ():
        spread = spread.repeat_interleave(_BLOCK, dim)
    spread = spread[..., :num_outputs, :num_inputs] if blocks else spread[..., None]
    return numbers, scales, numbers.double() * spread


def fp8_experts(
    op: Op,
    sizes: Sizes,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    blocks: bool = True,
    clamped: bool = False,
) -> None:
    """Some pairs go nowhere; in fixed order rows have the same bits in any company."""
    num_tokens, _, num_experts, hidden, width = sizes
    w13, s13, wide13 = fp8_weight((num_experts, 2, width, hidden), blocks=blocks, device=device)
    w2, s2, wide2 = fp8_weight((num_experts, hidden, width), blocks=blocks, device=device)
    x, weights, chosen = _step(sizes, dtype, device)
    more, plain = _gate(sizes, dtype, device) if clamped else ({}, ())
    wide = wide13.flatten(1, 2), wide2, weights, chosen
    exact = oracle.experts(x, *wide, *plain)
    expected = oracle.experts(x, *wide, *(plain or (None,) * 3), oracle.e4m3_groups)
    given = x, w13, s13, w2, s2, weights, chosen
    for fixed in (False, True):
        found = op(*given, fixed, **more)
        assert found.dtype == dtype and not found[num_tokens // 3].any()
        assert oracle.relative_error(found, expected) < ROUNDED[dtype] + _FLIPPED
        assert oracle.relative_error(found, exact) < _QUANTISED
    for start, end in ((0, 1), (num_tokens // 2, num_tokens)):
        part = weights[start:end], chosen[start:end]
        assert torch.equal(op(x[start:end], *given[1:5], *part, True, **more), found[start:end])


def fp8_pairs(
    tuning: ExpertTuning,
    sizes: Sizes,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    blocks: bool = True,
    clamped: bool = False,
) -> None:
    """Pairs that are computed by themselves give what the formula means, and the same whoever
    quantises their rows, and of how many ranks this is one; nothing is written of those that go
    nowhere."""
    num_tokens, top_k, num_experts, hidden, width = sizes
    w13, s13, wide13 = fp8_weight((num_experts, 2, width, hidden), blocks=blocks, device=device)
    w2, s2, wide2 = fp8_weight((num_experts, 1, hidden, width), blocks=blocks, device=device)
    x, weights, chosen = _step(sizes, dtype, device)
    x = _exact_in_e4m3(x)
    chosen[-1, 0] = -1
    more, plain = _gate(sizes, dtype, device) if clamped else ({}, ())
    wide = wide13.flatten(1, 2), wide2[:, 0], weights, chosen

    def in_e4m3(row: Tensor) -> Tensor:
        return oracle.e4m3_groups(row.to(dtype).double())  # Rows between the GEMMs are written.

    expected = oracle.experts(x, *wide, *(plain or (None,) * 3), in_e4m3)
    outs = []
    for quantised, ranks in ((False, 1), (True, 1), (True, 2), (True, num_tokens * top_k)):
        between, parts = (
            torch.full((num_tokens * top_k, size), torch.nan, dtype=dtype, device=device)
            for size in (width, hidden)
        )
        of, gate = (weights, chosen), more.get("gate")
        given = quantise_fp8(x, _BLOCK) if quantised else x
        fp8_pair_gemm(given, (w13, s13), *of, between, tuning, more.get("b13"), gate, ranks)
        rows = quantise_fp8(between, _BLOCK) if quantised else between
        fp8_pair_gemm(rows, (w2, s2), *of, parts, tuning, more.get("b2"), ranks=ranks)
        nowhere = chosen.flatten() < 0
        assert torch.equal(parts.isnan().all(1), nowhere)
        assert torch.equal(between.isnan().all(1), nowhere)
        outs.append(sum_pairs(parts, chosen))
        assert oracle.relative_error(outs[-1], expected) < ROUNDED[dtype] + _FLIPPED
    assert oracle.relative_error(outs[0], outs[1].double()) < ROUNDED[dtype] + _FLIPPED
    assert all(torch.equal(outs[1], one) for one in outs[2:]), "however few programs there are"


def fp8_down(tuning: ExpertTuning, dtype: torch.dtype, device: str, *, blocks: bool) -> None:
    """The second GEMM by tiles that tables may name, whose last column of outputs is not whole."""
    num_pairs, num_experts, width, hidden = 150, 3, 256, 320
    w2, s2, wide = fp8_weight((num_experts, 1, hidden, width), blocks=blocks, device=device)
    numbers, shares = quantise_fp8(torch.randn(num_pairs, width, device=device).to(dtype), _BLOCK)
    weights = torch.rand(num_pairs // 2, 2, device=device)
    chosen = torch.randint(num_experts - 1, (num_pairs // 2, 1), device=device)
    chosen = torch.cat([chosen, chosen + 1], 1).int()
    out = torch.full((num_pairs, hidden), torch.nan, dtype=dtype, device=device)
    rows = ExpertRows.of(chosen, num_experts)
    fp8_gemm((numbers, shares), (w2, s2), weights, rows, (out, None), tuning)
    given = numbers.double() * shares.T.double().repeat_interleave(_BLOCK, 1)
    products = torch.einsum("pi,phi->ph", given, wide[chosen.flatten().long(), 0])
    expected = products * weights.double().flatten()[:, None]
    assert oracle.relative_error(out, expected) < ROUNDED[dtype]


def fp4_experts(
    op: Op,
    sizes: Sizes,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    clamped: bool = False,
    form: Form = "mxfp4",
) -> None:
    """Some pairs go nowhere; in fixed order rows have the same bits in any company."""
    num_tokens, _, num_experts, hidden, width = sizes
    w13, f13, wide13 = fp4_weight(form, (num_experts, 2, width, hidden), device)
    w2, f2, wide2 = fp4_weight(form, (num_experts, hidden, width), device)
    x, weights, chosen = _step(sizes, dtype, device)
    x /= 16
    more, plain = _gate(sizes, dtype, device) if clamped else ({}, ())
    expected = oracle.experts(x, wide13.flatten(1, 2), wide2, weights, chosen, *plain)
    given = x, w13, w2, width, weights, chosen
    more |= {"f13": f13, "f2": f2}
    for fixed in (False, True):
        found = op(*given, fixed, **more)
        assert found.dtype == dtype and not found[num_tokens // 3].any()
        assert oracle.relative_error(found, expected) < ROUNDED[dtype]
    for start, end in ((0, 1), (num_tokens // 2, num_tokens)):
        part = weights[start:end], chosen[start:end]
        assert torch.equal(op(x[start:end], *given[1:4], *part, True, **more), found[start:end])


def fp4_experts_ahead(op: Op, sizes: Sizes, gate: GateForm | None, device: str) -> None:
    """Many rows give what the format means, whatever the heights of their tiles; not in fixed
    order they are multiplied ahead, where a GPU can."""
    num_tokens, top_k, num_experts, hidden, width = sizes
    w13, _, wide13 = fp4_weight("mxfp4", (num_experts, 2, width, hidden), device)
    w2, _, wide2 = fp4_weight("mxfp4", (num_experts, hidden, width), device)
    x, weights, chosen = _step(sizes, torch.bfloat16, device)
    x /= 16
    assert multiplies_ahead(x, w13, width, num_tokens * top_k, biased=False, gate=gate)
    expected = oracle.experts(x, wide13.flatten(1, 2), wide2, weights, chosen, None, None, gate)
    found = op(x, w13, w2, width, weights, chosen, gate=gate)
    assert not found[num_tokens // 3].any()
    assert oracle.relative_error(found, expected) < ROUNDED[torch.bfloat16]


def tiles_of_experts(counts: list[int], device: str = "cpu", top_k: int = 1) -> None:
    """Each pair is in one tile of its expert, tiles of an expert differ by one row at most, and
    tiles behind the last have none. Tokens of several experts may name one of them twice."""
    expert = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()
    chosen = torch.cat([expert, torch.full((5,), -1, dtype=torch.int32)]).to(device)
    shuffled = torch.randperm(len(chosen), device=device)
    chosen = chosen[shuffled].view(-1, top_k)
    found = ExpertTiles.of(ExpertRows.of(chosen, len(counts), searched=0))
    num_tiles, of_tile = int(found.tiles[0]), found.tiles[2:].view(-1, 2).tolist()
    heights: list[list[int]] = [[] for _ in counts]
    seen: list[int] = []
    for pairs, (own, height) in zip(found.pairs.tolist(), of_tile, strict=True):
        assert pairs[height:] == [chosen.numel()] * (len(pairs) - height)
        assert all(chosen.view(-1)[pair] == own for pair in pairs[:height])
        seen += pairs[:height]
        if height:
            heights[own].append(height)
    assert sorted(seen) == torch.where(chosen.view(-1) >= 0)[0].tolist()
    assert [height for _, height in of_tile[num_tiles:]] == [0] * (len(of_tile) - num_tiles)
    for own, count in zip(heights, counts, strict=True):
        assert len(own) == -(-count // HEIGHT)
        assert not own or max(own) - min(own) <= 1


def sorted_rows(counts: list[int], device: str = "cpu", width: int = 200) -> None:
    """Rows of an expert lie beside each other, as `quantise_fp8` makes them, and its tiles follow
    one another; those behind the last have none."""
    top_k = 3
    expert = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()
    going = len(expert)
    expert = torch.cat([expert, torch.full((-going % top_k + top_k,), -1, dtype=torch.int32)])
    chosen = expert[torch.randperm(len(expert))].view(-1, top_k).to(device)
    x = torch.randn(len(chosen), width, device=device)
    found = SortedTiles.of(chosen, len(counts))
    order = torch.argsort(chosen.view(-1), stable=True)[-going:]
    assert torch.equal(found.places[order].cpu(), torch.arange(going).int())
    numbers, scales = quantise_to_places(x, found)
    expected, of_groups = quantise_fp8(x, _BLOCK)
    assert torch.equal(numbers[:going].float(), expected[order // top_k].float())
    assert torch.equal(scales[:, :going], of_groups[:, order // top_k])
    starts = [sum(counts[:own]) for own in range(len(counts))]
    tiles = [
        [own, starts[own] + first, min(HEIGHT, count - first)]
        for own, count in enumerate(counts)
        for first in range(0, count, HEIGHT)
    ]
    of_tile = found.tiles[1:].view(-1, 3).tolist()
    assert found.tiles[0] == len(tiles) and of_tile[: len(tiles)] == tiles
    assert all(height == 0 for _, _, height in of_tile[len(tiles) :])


def fp4_pairs(
    tuning: ExpertTuning,
    sizes: Sizes,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    clamped: bool = False,
    form: Form = "mxfp4",
) -> None:
    """Pairs that are computed by themselves give what the format means, call after call the same
    bits: whichever program is last, it adds in the order of pairs and parts. Pairs that go nowhere
    are not waited for, and a token of such alone gets zeros."""
    num_tokens, top_k, num_experts, hidden, width = sizes
    w13, f13, wide13 = fp4_weight(form, (num_experts, 2, width, hidden), device)
    w2, f2, wide2 = fp4_weight(form, (num_experts, 1, hidden, width), device)
    x, weights, chosen = _step(sizes, dtype, device)
    x /= 16
    chosen[-1, 0] = -1
    more, plain = _gate(sizes, dtype, device) if clamped else ({}, ())
    expected = oracle.experts(x, wide13.flatten(1, 2), wide2[:, 0], weights, chosen, *plain)
    outs = []
    for _ in range(3 if device == "cuda" else 2):
        between = torch.full((num_tokens * top_k, width), torch.nan, dtype=dtype, device=device)
        out = torch.full((num_tokens, hidden), torch.nan, dtype=dtype, device=device)
        given = weights, chosen
        gate = more.get("b13"), more.get("gate")
        fp4_pair_gemm(x, w13, *given, between, tuning, *gate, factors=f13)
        fp4_pair_gemm(between, w2, *given, out, tuning, more.get("b2"), factors=f2)
        outs.append(out)
    assert not out[num_tokens // 3].any()
    assert oracle.relative_error(out, expected) < ROUNDED[dtype]
    assert all(torch.equal(other, out) for other in outs)


def fp4_even_runs(
    tuning: ExpertTuning,
    sizes: Sizes,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    form: Form = "mxfp4",
) -> None:
    """Programs that share all tiles out give what the format means, and always the same bits: cut
    tiles are summed in their order. Experts without rows have none of the line."""
    num_tokens, top_k, num_experts, hidden, width = sizes
    w13, f13, wide13 = fp4_weight(form, (num_experts, 2, width, hidden), device)
    w2, f2, wide2 = fp4_weight(form, (num_experts, 1, hidden, width), device)
    x, weights, chosen = _step(sizes, dtype, device)
    x /= 16
    more, plain = _gate(sizes, dtype, device)
    expected = oracle.experts(x, wide13.flatten(1, 2), wide2[:, 0], weights, chosen, *plain)
    assert takes_even_runs(tuning, num_tokens, chosen.numel(), max(hidden, width))
    assert not takes_even_runs(tuning, tuning.rows + 1, chosen.numel(), hidden)
    outs = []
    for _ in range(3 if device == "cuda" else 2):
        between, parts = (
            torch.full((num_tokens * top_k, size), torch.nan, dtype=dtype, device=device)
            for size in (width, hidden)
        )
        given = weights, chosen
        fp4_even_gemm(x, w13, *given, between, tuning, more["b13"], more["gate"], f13)
        fp4_even_gemm(between, w2, *given, parts, tuning, more["b2"], None, f2)
        outs.append(sum_pairs(parts, chosen))
    assert oracle.relative_error(outs[0], expected) < ROUNDED[dtype]
    assert all(torch.equal(other, outs[0]) for other in outs)


def fp4_few_rows(tuning: ExpertWarpTuning, sizes: Sizes) -> None:
    """Warps that multiply by themselves give what the format means, and always the same bits."""
    num_tokens, top_k, num_experts, hidden, width = sizes
    w13, _, wide13 = fp4_weight("mxfp4", (num_experts, 2, width, hidden), "cuda")
    x, _, chosen = _step(sizes, torch.bfloat16, "cuda")
    x /= 16
    _, (b13, _, gate) = _gate(sizes, torch.bfloat16, "cuda")
    outs = []
    for _ in range(3):
        outs.append(x.new_full((num_tokens * top_k, width), torch.nan))
        fp4_few_row_gate_up(x, w13, chosen, outs[-1], tuning, b13, gate)
    for pair, expert in enumerate(chosen.flatten().tolist()):
        if expert < 0:
            assert outs[0][pair].isnan().all()
            continue
        both = (wide13[expert] @ x[pair // top_k].double()).flatten() + b13[expert].double()
        left, up = both.split(width)
        left, up = left.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
        expected = (up + 1) * left / (1 + (-gate.alpha * left).exp())
        assert oracle.relative_error(outs[0][pair], expected) < ROUNDED[x.dtype]
    assert all(torch.equal(other.view(torch.int16), outs[0].view(torch.int16)) for other in outs)


def _exact_in_e4m3(x: Tensor) -> Tensor:
    """Returns rows near to `x` that are numbers of e4m3 times 1 / 64; each group has the largest.
    Of others in 16 bits many lie amid two of e4m3, and go to either by an error of rounding."""
    numbers = x.float().mul(64).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    numbers[:, ::_BLOCK] = 448
    return (numbers / 64).to(x.dtype)


def _step(sizes: Sizes, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Makes tokens, what their experts count, and these experts; one token has none."""
    num_tokens, top_k, num_experts, hidden, _ = sizes
    x = torch.randn(num_tokens, hidden, device=device).to(dtype)
    weights = torch.rand(num_tokens, top_k, device=device)
    chosen = torch.rand(num_tokens, num_experts, device=device).argsort(-1)[:, :top_k].int()
    chosen[num_tokens // 3] = -1
    return x, weights, chosen


def _gate(
    sizes: Sizes, dtype: torch.dtype, device: str
) -> tuple[dict[str, Any], tuple[Tensor, Tensor, GateForm]]:
    """Makes biases and gpt-oss' gate, whose limit is reached, for an operation and the oracle."""
    _, _, num_experts, hidden, width = sizes
    b13, b2 = (
        torch.randn(num_experts, size, device=device).to(dtype) for size in (2 * width, hidden)
    )
    gate = GateForm("clamped", limit=1.25, alpha=1.702)
    return {"b13": b13, "b2": b2, "gate": gate}, (b13, b2, gate)


def fp4_tilings(
    tunings: list[ExpertTuning],
    sizes: Sizes,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    form: Form = "mxfp4",
) -> None:
    """Every way to tile a GEMM gives the same: inner dimensions in parts, whose last one is cut,
    warps that multiply by themselves, tiles beyond the last, and where there are many pairs, tiles
    of more rows than a power of two."""
    num_tokens, top_k, num_experts, hidden, width = sizes
    w13, f13, wide13 = fp4_weight(form, (num_experts, 2, width, hidden), device)
    x, weights, chosen = _step(sizes, dtype, device)
    x /= 16
    rows = ExpertRows.of(chosen, num_experts)
    for tuning in tunings:
        for _ in range(min(2, tuning.splits)):
            out = torch.full((num_tokens * top_k, width), torch.nan, dtype=dtype, device=device)
            fp4_expert_gemm(x, w13, weights, rows, out, tuning, factors=f13)
        for pair, expert in enumerate(chosen.flatten().tolist()):
            if expert >= 0:
                gate, up = wide13[expert] @ x[pair // top_k].double()
                expected = gate / (1 + (-gate).exp()) * up
                assert oracle.relative_error(out[pair], expected) < ROUNDED[dtype], (tuning, pair)

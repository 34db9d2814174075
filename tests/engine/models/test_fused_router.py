"""Norm, router and experts in three launches: what they add is what five launches add, and they are
taken where the model, the ranks and the step allow it."""

from __future__ import annotations

from dataclasses import replace as changed

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from engine.layers.expert_methods import choice
from engine.layers.expert_methods.fp4 import Fp4Experts
from engine.layers.feed_forward.sparse_mlp import SparseMLP
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.shard import Shard
from engine.models.decoder.expert_block import sparse_mlp
from engine.models.specs.experts import SHARED_EXPERTS, ExpertSpec
from engine.parallel.place import ParallelPlace
from engine.parallel.token_exchange import Replicated
from engine.quantization import Mxfp4Scheme, Quantization, SchemeRule
from tandem_kernels import ops
from tandem_kernels.gemm.fp4_tiles import NUMBER_WORDS
from tests.engine.parallel.fake_group import FakeGroup

HIDDEN, ROWS = 64, 4
SPEC = ExpertSpec(
    count=72, top_k=4, intermediate_size=64, renormalise=True, router_bias=True, biases=True
)
FUSED = GemmPolicy(few_rows=16, adds_few_rows=True, fused_router_rows=ROWS)
POWERS = 0x7C7C7C7C
"""Exponents of tiles, for weights of at most 0.75."""


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes experts stay in MXFP4, which plain torch then computes with."""
    monkeypatch.setitem(choice.EXPERTS, Mxfp4Scheme, lambda scheme, shard: Fp4Experts(scheme))
    torch.manual_seed(5)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists which of both ways blocks go."""
    done: list[str] = []
    names = "normed_router", "fp4_routed_experts", "route_tokens", "experts_beside"
    for name in names:
        op = getattr(ops, name)

        def noted(*args: object, op: ops.Op = op, **options: object) -> object:  # type: ignore[type-arg]
            done.append(op.__name__)
            return op(*args, **options)

        monkeypatch.setattr(ops, name, noted)
    return done


def made(
    spec: ExpertSpec = SPEC,
    policy: GemmPolicy = FUSED,
    place: ParallelPlace | None = None,
    offset: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
    is_plain: bool = False,
) -> tuple[SparseMLP, RMSNorm]:
    """Makes a block and its norm, the same numbers each time."""
    rules = () if is_plain else (SchemeRule(("Linear",), Mxfp4Scheme()),)
    quantization = Quantization(method="test", rules=rules, ignored=("shared_experts",))
    place = place or ParallelPlace(range(1))
    shard = Shard(place, dtype, torch.device("cpu"), policy, quantization)
    block, norm = sparse_mlp(HIDDEN, spec, shard), RMSNorm(HIDDEN, 1e-5, shard, offset=offset)
    generator = torch.Generator().manual_seed(3)
    for parameter in (*block.parameters(), *norm.parameters()):
        if parameter.dtype == torch.int32:
            parameter.random_(-(2**31), 2**31, generator=generator)
            parameter[..., NUMBER_WORDS:] = POWERS
        else:
            parameter.normal_(std=0.3, generator=generator)
    norm.weight.add_(1.0)
    return block, norm


def added(block: SparseMLP, norm: RMSNorm, x: Tensor, slots: Tensor) -> Tensor:
    stream = ResidualStream(x.clone())
    block(stream, norm, slots)
    return stream.read(None)


def rows_of(count: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.randn(count, HIDDEN).to(dtype), torch.arange(count)


@pytest.mark.parametrize("rows", [1, 2, ROWS])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@torch.inference_mode()
def test_three_launches_add_what_five_add(rows: int, offset: float, launched: list[str]) -> None:
    """Padding is among the rows. The weights of a norm may be more exact than its rows."""
    fused, plain = made(offset=offset), made(policy=GemmPolicy(), offset=offset)
    x, slots = rows_of(rows)
    slots[1:2] = -1
    expected = added(*plain, x, slots)
    assert launched == ["route_tokens"]
    launched.clear()
    found = added(*fused, x, slots)
    assert launched == ["normed_router", "fp4_routed_experts"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.equal(found[0], x[0])


BESIDE = ExpertSpec(
    count=12, top_k=4, intermediate_size=64, renormalise=True, router_bias=True, shared_size=96,
    names=SHARED_EXPERTS,
)  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    [replace(BESIDE, shared_gate=True), replace(BESIDE, squared=True, sigmoid=True)],
    ids=["SiLU", "squares"],
)
@torch.inference_mode()
def test_shared_experts_are_in_the_launches_of_the_others(
    spec: ExpertSpec, launched: list[str]
) -> None:
    """All weights are plain. More rows take launches of their own."""
    fused = made(spec, changed(FUSED, beside_rows=ROWS), is_plain=True)
    x, slots = rows_of(ROWS)
    slots[1:2] = -1
    expected = added(*made(spec, GemmPolicy(beside_rows=ROWS), is_plain=True), x, slots)
    launched.clear()
    found = added(*fused, x, slots)
    assert launched == ["normed_router", "route_tokens", "experts_beside"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    launched.clear()
    added(*fused, *rows_of(ROWS + 1))
    assert launched == ["route_tokens"]


@pytest.mark.parametrize("with_choice", [{"scaling": 2.5}, {"renormalise": False}])
@torch.inference_mode()
def test_routers_keep_their_options(with_choice: dict[str, float], launched: list[str]) -> None:
    spec = replace(SPEC, **with_choice)  # type: ignore[arg-type]
    x, slots = rows_of(2)
    expected = added(*made(spec, GemmPolicy()), x, slots)
    torch.testing.assert_close(added(*made(spec), x, slots), expected, rtol=0, atol=0)
    assert launched[1:] == ["normed_router", "fp4_routed_experts"]


@pytest.mark.parametrize("rows", [1, ROWS])
@torch.inference_mode()
def test_norms_are_in_the_router_beside_a_shared_expert(rows: int, launched: list[str]) -> None:
    """Biases of logits count once. More rows are normed by themselves."""
    spec = replace(SPEC, shared_size=64, names=SHARED_EXPERTS, sigmoid=True, choice_bias=True)
    beside = changed(FUSED, beside_rows=ROWS)
    x, slots = rows_of(rows)
    expected = added(*made(spec, changed(beside, fused_router_rows=0)), x, slots)
    launched.clear()
    found = added(*made(spec, beside), x, slots)
    assert launched == ["normed_router", "route_tokens"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    launched.clear()
    added(*made(spec, beside), *rows_of(ROWS + 1))
    assert launched == ["route_tokens"]


OTHER_ROUTERS = {
    "sigmoid": replace(SPEC, sigmoid=True),
    "bias for choosing": replace(SPEC, choice_bias=True),
    "groups": replace(SPEC, num_groups=4, top_groups=2),
    "few experts": replace(SPEC, count=8),
}


@pytest.mark.parametrize("name", OTHER_ROUTERS)
@torch.inference_mode()
def test_norms_alone_are_in_the_router_of_other_blocks(name: str, launched: list[str]) -> None:
    """Their experts do not choose for themselves."""
    spec, (x, slots) = OTHER_ROUTERS[name], rows_of(2)
    expected = added(*made(spec, GemmPolicy()), x, slots)
    launched.clear()
    found = added(*made(spec), x, slots)
    assert launched == ["normed_router", "route_tokens"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [ROWS + 1, 2 * ROWS])
@torch.inference_mode()
def test_norms_are_in_the_router_of_more_rows_than_experts_choose_for(
    rows: int, launched: list[str]
) -> None:
    x, slots = rows_of(rows)
    expected = added(*made(policy=GemmPolicy()), x, slots)
    launched.clear()
    found = added(*made(policy=changed(FUSED, fused_router_rows=2 * ROWS)), x, slots)
    assert launched == ["normed_router", "route_tokens"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@torch.inference_mode()
def test_counted_tokens_are_chosen_for_in_a_launch_of_their_own(launched: list[str]) -> None:
    block, norm = made()
    block.router.loads = torch.zeros(SPEC.count, dtype=torch.int64)
    added(block, norm, *rows_of(2))
    assert launched == ["normed_router", "route_tokens"]
    assert block.router.loads.sum() == 2 * SPEC.top_k


@torch.inference_mode()
def test_other_steps_and_ranks_stay_as_they_are(launched: list[str]) -> None:
    """More rows, rows of float32, a stream to which something waits to be added, no norm, a shared
    expert, ranks that have slices, and ranks that bring their tokens together."""
    added(*made(), *rows_of(ROWS + 1))
    added(*made(replace(SPEC, shared_size=64, names=SHARED_EXPERTS)), *rows_of(2))
    added(*made(dtype=torch.float32), *rows_of(2, torch.float32))
    block, norm = made()
    x, slots = rows_of(2)
    stream = ResidualStream(x)
    stream.add(torch.ones_like(x))
    block(stream, norm, slots)
    block(ResidualStream(x), None, slots)
    exact = made(policy=changed(FUSED, deterministic=True))
    added(*exact, x, slots)
    ranks = ParallelPlace(range(1), exchange=Replicated())
    added(*made(place=ranks), x, slots)
    assert launched == ["route_tokens"] * 7
    sliced, _ = made(
        replace(SPEC, intermediate_size=128), place=ParallelPlace(range(1), FakeGroup(0, 2))
    )
    assert sliced.fused_rows == 0

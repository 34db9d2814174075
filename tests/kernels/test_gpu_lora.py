"""The Triton kernels of adapters on a CUDA device, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import lora_checks as check
import pytest
import torch

from tandem_kernels import ops
from tandem_kernels.lora.lora_gemm_shapes import num_counters

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _poisoned_and_fresh() -> Iterator[None]:
    torch.manual_seed(5)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.cuda.synchronize()
    torch.use_deterministic_algorithms(False)


def test_tokens_have_the_slots_of_their_rows() -> None:
    check.slots_of_tokens(ops.lora_slots_of_tokens, "cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [8, 16, 64, 256])
@pytest.mark.parametrize("num_tokens", [1, 16, 65, 700])
@pytest.mark.parametrize(
    ("inner", "counts"),
    [(4096, (4096, 1024, 1024)), (1024, (1024,)), (896, (4864, 4864)), (14336, (128,))],
)
def test_adapters_are_added_to_their_own_tokens(
    inner: int, counts: tuple[int, ...], num_tokens: int, rank: int, dtype: torch.dtype
) -> None:
    columns = ops.lora_shrink, ops.lora_expand
    check.shrink_and_expand(*columns, num_tokens, inner, counts, rank, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rank", "num_slots"), [(8, 3), (16, 8), (64, 5), (256, 2)])
@pytest.mark.parametrize("num_tokens", [1, 16, 64])
@pytest.mark.parametrize(
    ("inner", "counts"),
    [(4096, (4096, 1024, 1024)), (1024, (1024,)), (896, (4864, 4864)), (14336, (128,))],
)
def test_few_tokens_take_fewer_programs(
    inner: int,
    counts: tuple[int, ...],
    num_tokens: int,
    rank: int,
    num_slots: int,
    dtype: torch.dtype,
) -> None:
    few = ops.lora_shrink, ops.lora_expand_few, ops.lora_expand_gated
    for pieces in (4, 16):
        check.few_tokens(
            *few, num_tokens, inner, counts, rank, dtype, "cuda", num_slots, most_pieces=pieces
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rank", "num_slots"), [(8, 3), (16, 8), (64, 5), (256, 2)])
@pytest.mark.parametrize("num_tokens", [1, 16, 33])
@pytest.mark.parametrize(
    ("inner", "counts"),
    [
        (4096, (4096, 1024, 1024)),
        (1024, (1024,)),
        (768, (4864, 4864)),
        (1024, (14336, 14336)),
        (14336, (4096,)),
    ],
)
def test_a_layer_and_its_adapters_take_one_launch(
    inner: int,
    counts: tuple[int, ...],
    num_tokens: int,
    rank: int,
    num_slots: int,
    dtype: torch.dtype,
) -> None:
    columns = ops.lora_gemm, ops.lora_gate_up
    check.one_launch(*columns, num_tokens, inner, counts, rank, num_slots, dtype, "cuda")


@pytest.mark.parametrize("outputs", [4096, 28672])
def test_one_launch_never_waits_for_itself_and_has_the_same_bits_every_time(outputs: int) -> None:
    """Launches behind each other in a graph, with the same counters, while another stream takes
    SMs away from them."""
    torch.use_deterministic_algorithms(False)  # Else it fills memory between the launches.
    inner, rank, num_slots = 4096, 16, 8
    half = {"dtype": torch.bfloat16, "device": "cuda"}
    x = torch.randn(16, inner, **half)
    weight = torch.randn(outputs, inner, **half)
    a = torch.randn(num_slots, rank, inner, **half)
    b = torch.randn(num_slots, outputs, rank, **half)
    slots = torch.arange(16, dtype=torch.int32, device="cuda") % num_slots
    counters = torch.zeros(num_counters(outputs), dtype=torch.int32, device="cuda")
    other = torch.randn(2048, 2048, **half)

    def run() -> torch.Tensor:
        return ops.lora_gemm(x, weight, None, a, b, slots, (outputs,), counters)

    expected = run()
    torch.cuda.synchronize()
    graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        found = [run() for _ in range(64)]
    for _ in range(8):
        with torch.cuda.stream(beside):
            for _ in range(32):
                torch.mm(other, other)
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in found)
    assert not counters.any()

"""Layers by themselves: how the vocabulary and the heads are cut, and the rotary table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.head_sizes import HeadSizes
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.linear import QKVParallelLinear, RowParallelLinear
from engine.layers.rotary import cos_sin_cache, inverse_frequencies, llama3_scaled
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.vocabulary.embedding import LMHead, VocabParallelEmbedding
from engine.parallel.distributed import ParallelGroup
from engine.parallel.place import ParallelPlace
from engine.rope import RopeScaling, Rotary
from kv_transfer.planes import heads_of_rank


class FakeGroup(ParallelGroup):
    """A rank without its peers: collectives are not called."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(0, 1)
        self.rank, self.size = rank, size


def shard(rank: int = 0, size: int = 1) -> Shard:
    return Shard(ParallelPlace(range(1), FakeGroup(rank, size)), torch.float32, torch.device("cpu"))


def rows_of(weight: CheckpointWeight) -> range:
    assert weight.dim == 0
    return range(weight.start, weight.start + weight.target.shape[0])


@given(vocab_size=st.integers(1, 1000), size=st.integers(1, 8))
def test_every_row_of_the_vocabulary_is_on_one_rank(vocab_size: int, size: int) -> None:
    embeddings = [VocabParallelEmbedding(vocab_size, 2, shard(rank, size)) for rank in range(size)]
    filled = [row for e in embeddings for w in e.checkpoint_weights("x") for row in rows_of(w)]
    assert filled == list(range(vocab_size))
    assert len({e.weight.shape for e in embeddings}) == 1
    assert embeddings[0].num_rows % 64 == 0
    for embedding in embeddings:
        assert not embedding.weight[embedding.num_filled :].any()


def test_padding_is_cut_from_logits() -> None:
    head = LMHead(5, 3, shard())
    head.weight[:5] = torch.randn(5, 3)
    hidden = torch.randn(4, 3)
    logits = head(hidden)
    assert logits.shape == (4, 5)
    assert logits.is_contiguous() and logits.dtype == torch.float32
    assert head(hidden[:1]).stride() == logits.stride()
    torch.testing.assert_close(logits, hidden @ head.weight[:5].T)


def test_tied_head_holds_no_second_table() -> None:
    embedding = VocabParallelEmbedding(5, 3, shard())
    assert LMHead(5, 3, shard(), embedding.weight).weight is embedding.weight


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_each_query_head_finds_its_kv_head_on_its_rank(size: int) -> None:
    """Eight query heads share 2 KV heads; with 4 and 8 ranks neighbours hold the same one."""
    seen: list[int] = []
    for rank in range(size):
        kv_heads = heads_of_rank(2, rank, size)
        qkv = QKVParallelLinear(6, HeadSizes.alike(8, 2, 4), kv_heads, shard(rank, size), bias=True)
        weights = {w.name: w for w in qkv.checkpoint_weights("q", "k", "v")}
        assert set(weights) == {f"{p}.{s}" for p in "qkv" for s in ("weight", "bias")}
        assert weights["q.weight"].shape == (32, 6) and weights["k.bias"].shape == (8,)
        q_rows = rows_of(weights["q.weight"])
        assert rows_of(weights["q.bias"]) == q_rows
        heads = range(q_rows.start // 4, q_rows.stop // 4)
        seen += heads
        k_rows = rows_of(weights["k.weight"])
        assert rows_of(weights["v.bias"]) == k_rows
        per_kv_head = len(heads) // kv_heads.count
        for index, head in enumerate(heads):
            assert k_rows.start // 4 + index // per_kv_head == head // 4
    assert seen == list(range(8))


def test_a_layer_that_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="10 cannot be shared by 4 ranks"):
        RowParallelLinear(10, 4, shard(1, 4))


def test_rotary_table_turns_pairs() -> None:
    table = cos_sin_cache(8, 20, Rotary(theta=10_000.0, dim=8))
    assert table.shape == (20, 8) and table.dtype == torch.float32
    angles = 7 * 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(table[7], torch.cat((angles.cos(), angles.sin())))
    assert table[0].tolist() == [1.0] * 4 + [0.0] * 4


@given(
    pairs=st.integers(1, 6),
    staying=st.integers(0, 4),
    interleaved=st.booleans(),
    position=st.integers(0, 19),
)
def test_reordered_heads_score_alike(
    pairs: int, staying: int, interleaved: bool, position: int
) -> None:
    """Against the plain meaning: pairs where the checkpoint has them, the rest as it is."""
    dim, size = 2 * pairs, 2 * (pairs + staying)
    rotary = Rotary(theta=100.0, dim=dim, interleaved=interleaved)
    query, key = torch.randn(2, size, dtype=torch.float64)
    angles = position * 100.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def turned(head: Tensor) -> Tensor:
        halves = (head[:dim:2], head[1:dim:2]) if interleaved else head[:dim].chunk(2)
        pairs = torch.complex(*halves) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((pairs.real, pairs.imag, head[dim:]))

    order = rotary.head_order(size)
    table = cos_sin_cache(size, 20, rotary)[position].double()
    cos, sin = table.chunk(2)

    def turned_by_us(head: Tensor) -> Tensor:
        first, second = (head if order is None else head[list(order)]).chunk(2)
        return torch.cat((first * cos - second * sin, second * cos + first * sin))

    assert (order is None) == (not interleaved and not staying)
    torch.testing.assert_close(
        turned_by_us(query) @ key_in_order(key, order), turned(query) @ plain(key, rotary),
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip


def key_in_order(key: Tensor, order: tuple[int, ...] | None) -> Tensor:
    return key if order is None else key[list(order)]


def plain(key: Tensor, rotary: Rotary) -> Tensor:
    """Returns a key at position 0, its pairs as `turned` lists them."""
    dim = rotary.dim
    halves = (key[:dim:2], key[1:dim:2]) if rotary.interleaved else key[:dim].chunk(2)
    return torch.cat((*halves, key[dim:]))


def test_llama3_scaling_leaves_fast_pairs_and_slows_slow_ones() -> None:
    scaling = RopeScaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    plain = inverse_frequencies(128, 500_000.0)
    scaled = llama3_scaled(plain, scaling)
    turns = 8192 * plain / (2 * torch.pi)
    assert torch.equal(scaled[turns >= 4.0], plain[turns >= 4.0])
    torch.testing.assert_close(scaled[turns <= 1.0], plain[turns <= 1.0] / 8.0)
    between = (turns > 1.0) & (turns < 4.0)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8.0))[between].all()


@given(
    units=st.integers(1, 60),
    unit=st.integers(1, 128),
    less=st.integers(0, 127),
    size=st.integers(1, 8),
)
def test_units_that_stay_together_are_shared_in_whole(
    units: int, unit: int, less: int, size: int
) -> None:
    total = units * unit - less % unit
    if (unit == 1 and total % size) or (unit > 1 and units < size):
        with pytest.raises(ValueError, match="cannot be shared"):
            shard(size - 1, size).part_of_units(total, unit)
        return
    parts = [shard(rank, size).part_of_units(total, unit) for rank in range(size)]
    assert [i for start, count in parts for i in range(start, start + count)] == list(range(total))
    assert all(start % unit == 0 for start, _ in parts)
    widths = [-(-count // unit) for _, count in parts]
    assert max(widths) - min(widths) <= 1


@pytest.mark.parametrize("policy", [GemmPolicy(), GemmPolicy(deterministic=True)], ids=str)
def test_a_row_layer_adds_to_what_is_there(policy: GemmPolicy) -> None:
    layer = RowParallelLinear(24, 16, replace(shard(), gemms=policy))
    layer.weight.copy_(torch.randn(16, 24))
    x, out = torch.randn(5, 24), torch.randn(5, 16)
    expected = out.double() + x.double() @ layer.weight.double().t()
    layer.accumulate(x, out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)

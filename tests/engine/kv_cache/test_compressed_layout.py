"""Layers in several groups, whose rows stand for 1, 4 or 128 tokens: sizes, and which peers fit."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.kv_cache.capacity import blocks_a_token, blocks_besides, hit_stride, num_blocks_for
from engine.kv_cache.kv_cache_manager import KVCacheManager
from kv_transfer.control.sizing import pull_bytes_per_token
from kv_transfer.errors import HandshakeMismatch
from kv_transfer.group_sizes import in_fp8, share_page_size, with_draft_layers
from kv_transfer.layout import KVGroup, KVLayout, own_groups
from kv_transfer.planes import Plane
from tests.engine.kv_cache.test_kv_cache_manager import make_request


def flash(block_size: int) -> KVLayout:
    """Keeps what DeepSeek V4-Flash keeps in bfloat16: 21 layers with rows of 4 tokens, 20 with rows
    of 128, and two with a window alone."""

    def rows(
        layers: range, *planes: Plane, ratio: int = 1, window: int | None = None, align: int = 1
    ) -> KVGroup:
        return KVGroup(
            layers=tuple(layers),
            planes=planes,
            block_size=block_size * ratio,
            dtype="float32" if align > 1 else "bfloat16",
            compress_ratio=ratio,
            window=window,
            window_align=align,
        )

    kv, index, scale, open_4, open_128 = (
        Plane(name, 1, num_bytes, replicated=True)
        for name, num_bytes in (
            ("kv", 1024), ("index", 128), ("index_scale", 4), ("open", 10240), ("open", 4096)
        )
    )  # fmt: skip
    groups = [
        rows(range(21), kv, window=128),
        rows(range(21, 43), kv, window=128),
        rows(range(21), open_4, window=5, align=4),
        rows(range(21, 41), open_128, window=1, align=128),
        rows(range(21), kv, index, scale, ratio=4),
        rows(range(21, 41), kv, ratio=128),
    ]
    return KVLayout(groups=share_page_size(groups, 1), tp_size=1, model_hash="m")


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_what_a_token_of_v4_flash_takes(block_size: int) -> None:
    """Little more than the rows themselves, as those of 128 tokens lie in a slot that those of 4
    leave unused, and a block for what is open or in a window."""
    shape = flash(block_size)
    in_windows, _, open_4, open_128, of_4, of_128 = shape.groups
    block_size = max(block_size, 32)  # Blocks have whole rows of 128 tokens.
    assert [in_windows.block_size, of_4.block_size] == [block_size, 4 * block_size]
    assert (of_128.block_size, of_128.blocks_of) == (of_4.block_size, 4)
    assert 4 * block_size % open_4.block_size == 0 == 128 % open_128.block_size
    kept = 21 * (1024 + 132) / 4 + 20 * 1024 / 128
    assert pull_bytes_per_token(shape) == kept == 6229
    assert kept < blocks_a_token(shape.groups) * shape.block_bytes < 1.021 * kept
    hits = hit_stride(shape.groups)
    assert hits == 32 * block_size
    for group in shape.groups:
        assert hits % group.block_size == 0


def test_pages_of_rows_lie_beside_each_other() -> None:
    shape = flash(64)
    ends = [0] * shape.num_slots
    for index, group in enumerate(shape.groups[4:], 4):
        for layer in range(len(group.layers)):
            slot, start = shape.places(index).place_of(layer)
            assert start == ends[slot], "no page lies in another"
            ends[slot] += group.bytes_needed(1)
    assert max(ends) <= shape.page_bytes


def test_rows_without_free_slots_have_blocks_of_their_own() -> None:
    groups = [msgspec.structs.replace(one, blocks_of=-1) for one in flash(64).groups]
    groups[1] = msgspec.structs.replace(groups[1], layers=groups[1].layers[:21])
    *_, of_4, of_128 = share_page_size(groups, 1)
    assert of_128.blocks_of == -1
    assert of_128.block_size == 8 * of_4.block_size


def test_what_an_answer_and_a_prompt_of_v4_flash_take_besides() -> None:
    """Steps do not keep what their tokens leave for open rows, but for what is read later: for 2048
    tokens of two steps that would be 1,200 blocks more."""
    shape = flash(64)
    assert blocks_besides(shape.groups, 1) == 2 * 4 + 4 + 10
    assert blocks_besides(shape.groups, 2048) == 2 * 67 + 14 + 18


def test_a_prompt_of_a_million_tokens_goes_through_the_blocks_that_it_is_promised() -> None:
    """Steps are scheduled while the one before is computed. No block is left over, and none lacks;
    an answer then has what its rows and windows need."""
    groups, chunk, length = flash(64).groups, 8192, (1 << 20) - 64
    num_blocks = num_blocks_for(groups, length, chunk)
    assert num_blocks < 1.15 * blocks_a_token(groups) * length
    request = make_request([7] * length)
    few, manager = (
        KVCacheManager(count, groups, False, step_tokens=chunk)
        for count in (num_blocks - 1, num_blocks)
    )
    nothing, _ = manager.get_computed_blocks(request, length - 1)
    assert not few.can_allocate(length, nothing)
    assert manager.can_allocate(length, nothing)
    blocks = manager.allocate_slots(request, length, nothing)
    assert blocks is not None
    for stop in range(chunk, length + chunk, chunk):
        assert manager.extend(blocks, min(stop, length)) is not None, "what was promised"
        manager.confirm(request, stop - chunk)
    manager.confirm(request, length)
    for token in range(length, length + 64):
        request.append_output_token(5)
        assert manager.grow(blocks, token + 1) is not None
        manager.confirm(request, token)
    of_rows = [group for group in own_groups(groups) if group.compress_ratio > 1]
    rows = sum(group.num_blocks_for(length + 64) for group in of_rows)
    held = num_blocks - manager.block_pool.num_free_blocks
    assert rows < held <= rows + blocks_besides(groups, 1)


def test_layers_of_a_drafter_join_the_smallest_group_that_is_alike() -> None:
    """A window of its own would be a seventh group; with the larger half of the layers each block
    of all groups would have a page more."""
    groups = flash(64).groups
    window = msgspec.structs.replace(groups[0], layers=(0,))
    joined = with_draft_layers(groups, [window])
    assert [len(group.layers) for group in joined] == [22, 22, 21, 20, 21, 20]
    assert joined[0].layers[-1] == 43


def test_open_rows_and_index_keys_stay_as_they_are_in_fp8() -> None:
    for group in flash(64).groups:
        found = in_fp8(group, "s")
        if group.is_open:
            assert found == group
        else:
            sizes = [(plane.name, plane.row_bytes) for plane in found.planes]
            assert sizes[0] == ("kv", 512) and sizes[1:] in (
                [],
                [("index", 128), ("index_scale", 4)],
            )


@pytest.mark.parametrize(
    ("field", "index", "value"),
    [("compress_ratio", 4, 8), ("window_align", 2, 8), ("window", 2, 9)],
)
def test_nodes_whose_rows_stand_for_other_tokens_are_refused(
    field: str, index: int, value: int
) -> None:
    ours = flash(64)
    other = msgspec.structs.replace(ours.groups[index], **{field: value})
    groups = (*ours.groups[:index], other, *ours.groups[index + 1 :])
    with pytest.raises(HandshakeMismatch, match=rf"groups\[{index}\]\.{field}"):
        ours.check_compatible(msgspec.structs.replace(ours, groups=groups))


@pytest.mark.parametrize("size", [0, 6, 1 << 20])
def test_blocks_that_cut_a_row_are_refused(size: int) -> None:
    ours = flash(64)
    other = msgspec.structs.replace(ours.groups[4], block_size=size)
    groups = (*ours.groups[:4], other, *ours.groups[5:])
    with pytest.raises(HandshakeMismatch, match=r"groups\[4\]\.block_size"):
        ours.check_compatible(msgspec.structs.replace(ours, groups=groups))


@pytest.mark.parametrize(
    "changes",
    [{"blocks_of": 6}, {"blocks_of": 5}, {"block_size": 512}, {"layers": tuple(range(21, 51))}],
    ids=str,
)
def test_pages_outside_of_a_peer_s_blocks_are_refused(changes: dict[str, Any]) -> None:
    ours = flash(64)
    other = msgspec.structs.replace(ours.groups[5], **changes)
    groups = (*ours.groups[:5], other)
    with pytest.raises(HandshakeMismatch, match=r"groups\[5\]\.(blocks_of|layers)"):
        ours.check_compatible(msgspec.structs.replace(ours, groups=groups))

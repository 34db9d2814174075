"""Every operation states what its kernel takes of its tensors, and is held to it."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_pages import KVPages
from tandem_kernels.reference.layouts import LayoutError, Need, kernel_takes, layouts_of

EVERY_OP = {name: op for name, op in vars(ops).items() if isinstance(op, ops.Op)}


def kinds_of(hint: Any) -> Iterator[Any]:
    """Yields what a value may be, or hold, by its annotation."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, tuple) or isinstance(
        typing.get_origin(hint), type
    ):
        for part in typing.get_args(hint):
            yield from kinds_of(part)
    else:
        yield hint


def unstated(name: str, hint: Any, need: Need | None) -> Iterator[str]:
    """Yields tensors of a parameter of which `need` says nothing."""
    text, fields = need if isinstance(need, tuple) else (need, need)
    for kind in kinds_of(hint):
        if kind is Tensor and not isinstance(text, str):
            yield name
        elif dataclasses.is_dataclass(kind):
            own = fields if isinstance(fields, Mapping) else {}
            for field, part in typing.get_type_hints(kind).items():
                yield from unstated(f"{name}.{field}", part, own.get(field))


@pytest.mark.parametrize("name", EVERY_OP)
def test_every_tensor_of_an_operation_is_stated(name: str) -> None:
    reference, needs = EVERY_OP[name].reference, EVERY_OP[name].layouts.needs
    hints = typing.get_type_hints(reference)
    del hints["return"]
    missing = [
        tensor
        for parameter, hint in hints.items()
        for tensor in unstated(parameter, hint, needs.get(parameter))
    ]
    assert missing == []


def test_an_operation_without_a_statement_is_not_made() -> None:
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    with pytest.raises(TypeError, match="doubled does not state"):
        ops.Op(doubled, "elementwise.doubled")
    with pytest.raises(TypeError, match=r"no parameters \['y'\]"):
        kernel_takes(y="T")(doubled)


def stated(text: str) -> Any:
    """Returns the check of an operation of one tensor."""

    @kernel_takes(x=text)
    def operation(x: Tensor) -> Tensor:
        return x

    return lambda x: layouts_of(operation).check((x,), {})


WIDE = torch.zeros(4, 16)


@pytest.mark.parametrize(
    ("text", "taken", "refused"),
    [
        ("T H", WIDE, WIDE[:, :8]),
        ("T | H", WIDE[:, 3:8], WIDE.t()),
        ("T | H", WIDE[:1].expand(4, 16), WIDE[:, :1].expand(4, 16)),
        ("E", WIDE[:, 0].contiguous(), WIDE[:, :1].reshape(4)),
        ("E", WIDE[0], WIDE[0, :1].expand(4)),
        ("T H |", WIDE.t(), WIDE[0]),
        ("T H | D", WIDE.view(4, 4, 4)[:, :, :2], WIDE.view(4, 4, 4).transpose(1, 2)),
        ("T | H D", WIDE[:, 4:12].view(4, 2, 4), WIDE.view(4, 4, 4)[:, :, :2]),
        ("* | H", WIDE.view(2, 2, 16)[..., :8], WIDE.view(2, 2, 4, 4).transpose(0, 1)),
        ("* | H", WIDE.view(2, 2, 4, 4)[..., :2], WIDE.view(2, 2, 4, 4)[:, :, :2]),
        ("N or N G", WIDE[0], WIDE[None]),
        ("N : float32", WIDE[0], WIDE[0].half()),
        ("N : int", WIDE[0].int(), WIDE[0]),
        ("T T", torch.zeros(4, 4), WIDE),
        ("T T+12", WIDE, torch.zeros(4, 4)),
        ("T >=T", WIDE, WIDE.t().contiguous()),
        ("4 _", WIDE, WIDE.t().contiguous()),
        ("N @16", WIDE[0, 4:8], WIDE[0, 5:8]),
        ("T | H @16", WIDE[:, 4:8], torch.zeros(4, 6)[:, :4]),
    ],
)
def test_layouts(text: str, taken: Tensor, refused: Tensor) -> None:
    stated(text)(taken)
    with pytest.raises(LayoutError, match="operation: its kernel takes `x`"):
        stated(text)(refused)


def test_steps_between_single_numbers_are_never_taken() -> None:
    stated("T H")(torch.zeros(1, 8)[:, ::8].expand(1, 1))
    stated("T H")(torch.zeros(4, 16)[:0, :8])


def test_a_reference_is_held_to_what_its_kernel_takes() -> None:
    """A row that stands for all is a view of one number: a kernel would read those behind it."""
    logits, values = torch.zeros(2, 8), torch.ones(3)
    rows, cols = torch.tensor([1]), torch.tensor([4, 5, 6])
    with pytest.raises(LayoutError, match=r"add_sparse: its kernel takes `rows`.*strides \[0\]"):
        ops.add_sparse(logits, rows.expand(3), cols, values)
    ops.add_sparse(logits, rows.repeat(3), cols, values)
    assert logits.sum() == 3


def test_fields_are_held_to_it_as_well() -> None:
    tables = torch.zeros(1, 4, dtype=torch.int32)
    bounds, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1])
    q, cache = torch.zeros(1, 2, 8), torch.zeros(4, 2, 2, 4, 8)
    with pytest.raises(LayoutError, match=r"paged_attention: its kernel takes `metadata.seq_lens`"):
        ops.paged_attention(q, cache, AttentionMetadata(tables, bounds, lengths, 1, 1, 16), 1.0)
    of_step = AttentionMetadata(tables, bounds, lengths.int(), 1, 1, 16)
    assert ops.paged_attention(q, cache, of_step, 1.0).shape == q.shape


def test_kernels_are_held_to_it_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    launched = []
    monkeypatch.setattr(ops.add_sparse, "_kernel", lambda *args: launched.append(args))
    logits, ones = torch.zeros(2, 8), torch.ones(3)
    rows, cols = torch.tensor([1]).expand(3), torch.tensor([4, 5, 6])
    ops.add_sparse.kernel(logits, rows, cols, ones)
    with ops.checked_kernels():
        with pytest.raises(LayoutError, match="add_sparse"):
            ops.add_sparse.kernel(logits, rows, cols, ones)
        with pytest.raises(LayoutError, match="several devices"):
            ops.add_sparse.kernel(logits.to("meta"), rows.contiguous(), cols, ones)
        ops.add_sparse.kernel(logits, rows.contiguous(), cols, ones)
    ops.add_sparse.kernel(logits, rows, cols, ones)
    assert len(launched) == 3


def test_what_shares_pages_is_held_to_one_memory() -> None:
    """A kernel finds values by the step of the keys, and by how far behind them they begin."""
    both = torch.zeros(3, 2 * 4 * (8 + 6))
    keys, values = (part.view(3, 2, 4, -1) for part in both.split([2 * 4 * 8, 2 * 4 * 6], dim=1))
    q, k, v = torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), torch.ones(1, 2, 6)
    slot, table = torch.tensor([5]), torch.zeros(1, 8)

    def write(pages: KVPages) -> None:
        ops.rope_and_cache(q, k, v, torch.tensor([0]), table, pages, slot)

    write(KVPages(keys, values))
    assert values.sum() == v.sum() and keys.sum() == 0
    alike = torch.zeros_like(both)[:, : 2 * 4 * 6].view(3, 2, 4, 6)
    for elsewhere in (values.clone(), alike):
        with pytest.raises(LayoutError, match=r"rope_and_cache: its kernel takes `kv_cache.v`"):
            write(KVPages(keys, elsewhere))

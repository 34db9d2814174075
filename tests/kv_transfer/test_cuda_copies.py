"""Which call of the driver copies are issued by. The driver is a stand-in that copies at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_uint64
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kv_transfer.memory.devices.cuda_copies import CudaCopies
from kv_transfer.memory.devices.cuda_driver import CudaError

NOT_SUPPORTED, INVALID_VALUE = 801, 1


class Call:
    """A function of the driver: converts its arguments as ctypes does, and remembers them."""

    def __init__(self, body: Callable[..., int]) -> None:
        self.body = body
        self.calls: list[tuple[Any, ...]] = []
        self.argtypes: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> int:
        self.calls.append(arguments)
        prototype = ctypes.CFUNCTYPE(c_int, *self.argtypes)
        return int(prototype(self.body)(*arguments))


def move(target: int, source: int, size: int, stream: int) -> int:
    ctypes.memmove(target, source, size)
    return 0


def batch(targets: int, sources: int, sizes: int, count: int, attributes: int, *rest: int) -> int:
    first, num_attributes, *_, stream = rest
    assert num_attributes == 1 and stream == 7
    assert c_size_t.from_address(first).value == 0
    assert c_int.from_address(attributes).value == 1, "sources are read in the stream's order"
    words = c_uint64 * count
    columns = (words.from_address(address) for address in (targets, sources, sizes))
    for target, source, size in zip(*columns, strict=True):
        ctypes.memmove(target, source, size)
    return 0


def check(name: str, code: int) -> None:
    if code:
        raise CudaError(name, code, "as told")


def issue(copies: CudaCopies, count: int) -> None:
    """`count` bytes in reverse order, each with a neighbour that must stay."""
    source = np.arange(1, count + 1, dtype=np.uint8)
    target = np.zeros(2 * count, np.uint8)
    order = np.arange(count)[::-1]
    targets = target.ctypes.data + 2 * order
    copies.issue(targets, source.ctypes.data + order, np.ones_like(order), 7)
    np.testing.assert_array_equal(target[::2], source)
    assert not target[1::2].any()


@pytest.mark.parametrize(
    ("names", "used"),
    [
        (("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"), "cuMemcpyBatchAsync_v2"),
        (("cuMemcpyBatchAsync",), "cuMemcpyBatchAsync"),
        ((), "cuMemcpyAsync"),
    ],
    ids=["CUDA 13", "CUDA 12.8", "older"],
)
def test_the_newest_call_that_the_driver_has(names: tuple[str, ...], used: str) -> None:
    calls = {name: Call(batch) for name in names} | {"cuMemcpyAsync": Call(move)}
    copies = CudaCopies(SimpleNamespace(**calls), check)
    issue(copies, 200)
    assert {name: len(call.calls) for name, call in calls.items() if call.calls} == {
        used: 200 if used == "cuMemcpyAsync" else 2
    }
    num_arguments = len(calls[used].calls[0])
    assert num_arguments == {"cuMemcpyBatchAsync": 9, "cuMemcpyBatchAsync_v2": 8}.get(used, 4)
    assert (used in copies.way) == bool(names)


@pytest.mark.parametrize(("size", "calls"), [(64 << 10, 5), (256 << 10, 20), (1 << 20, 20)])
def test_others_get_their_turn_between_portions(size: int, calls: int) -> None:
    """Copies go 256 KiB at once, or one at a time if it is larger."""
    single, many = Call(lambda *arguments: 0), Call(lambda *arguments: 0)
    copies = CudaCopies(SimpleNamespace(cuMemcpyAsync=single, cuMemcpyBatchAsync_v2=many), check)
    addresses = np.arange(20)
    copies.issue(addresses, addresses, np.full(20, size), 7, portion_bytes=256 << 10)
    assert len(single.calls) + len(many.calls) == calls
    assert sum(arguments[3] for arguments in many.calls) + len(single.calls) == 20


def test_a_device_that_refuses_batches_gets_single_copies() -> None:
    single, refusing = Call(move), Call(lambda *arguments: NOT_SUPPORTED)
    copies = CudaCopies(
        SimpleNamespace(cuMemcpyAsync=single, cuMemcpyBatchAsync_v2=refusing), check
    )
    for _ in range(2):
        issue(copies, 3)
    assert (len(refusing.calls), len(single.calls)) == (1, 6)
    assert copies.way == "one by one"


@pytest.mark.parametrize(("count", "name"), [(1, "cuMemcpyAsync"), (2, "cuMemcpyBatchAsync_v2")])
def test_an_error_names_the_call(count: int, name: str) -> None:
    calls = {
        call: Call(lambda *arguments: INVALID_VALUE)
        for call in ("cuMemcpyAsync", "cuMemcpyBatchAsync_v2")
    }
    with pytest.raises(CudaError, match=f"{name} failed"):
        issue(CudaCopies(SimpleNamespace(**calls), check), count)

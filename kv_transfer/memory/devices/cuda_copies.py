"""Many copies by one call of the CUDA driver.

A copy that is issued alone waits for the one before it: 256 KiB move at 64 GB/s between two H200,
and at 300 GB/s and more when the driver is notified of many at once, for a fifth of the processor
time. The driver can do so since CUDA 12.8; CUDA 13 dropped an argument of that call and gave it
another name. With an older driver, or a device that refuses it, copies are issued one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from kv_transfer.memory.devices.copy_stream import Numbers

_NOT_SUPPORTED = 801
_SOURCES_IN_STREAM_ORDER = 1
_MOST_AT_ONCE = 128
"""The device begins when the call returns, so a longer one is no faster, but begins later."""

_ARRAYS = (c_void_p, c_void_p, c_void_p, c_size_t)
_ATTRIBUTES = (c_void_p, c_void_p, c_size_t)


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The places are hints that nothing needs for memory of devices."""

    _fields_ = (
        ("source_order", c_int),
        ("source_place", c_int * 2),
        ("target_place", c_int * 2),
        ("flags", c_uint),
    )


class CudaCopies:
    """`library` is the driver; `check` raises for a result that is not 0."""

    def __init__(self, library: Any, check: Callable[[str, int], None]) -> None:
        self._check = check
        self._single = library.cuMemcpyAsync
        self._single.argtypes = (c_uint64, c_uint64, c_size_t, c_void_p)
        self._attributes = _Attributes(source_order=_SOURCES_IN_STREAM_ORDER)
        self._attribute_of = c_size_t(0)
        """The first copy that has the attributes: they all do."""
        self._failed = c_size_t(0)
        self._name, self._batch = "", None
        for name, rest in (
            ("cuMemcpyBatchAsync_v2", (c_void_p,)),
            ("cuMemcpyBatchAsync", (c_void_p, c_void_p)),
        ):
            batch = getattr(library, name, None)
            if batch is not None:
                batch.argtypes = (*_ARRAYS, *_ATTRIBUTES, *rest)
                self._name, self._batch = name, batch
                break

    @property
    def way(self) -> str:
        """Names the way of copying, for logs."""
        return f"many at once ({self._name})" if self._batch is not None else "one by one"

    def issue(
        self,
        targets: Numbers,
        sources: Numbers,
        sizes: Numbers,
        stream: int,
        portion_bytes: int = 0,
    ) -> None:
        """Copies as `CopyStream.copy` does, in portions of this many bytes; 0: as many as can
        be."""
        at_once = _MOST_AT_ONCE
        if portion_bytes:
            at_once = max(1, min(at_once, portion_bytes // int(sizes.max())))
        is_alone = at_once == 1 or len(targets) == 1
        if is_alone or not self._issue_batches(targets, sources, sizes, stream, at_once):
            self.issue_alone(targets, sources, sizes, stream)

    def issue_alone(self, targets: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> None:
        """Issues copies by a call for each."""
        single, check = self._single, self._check
        for copy in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            check("cuMemcpyAsync", single(*copy, stream))

    def _issue_batches(
        self, targets: Numbers, sources: Numbers, sizes: Numbers, stream: int, at_once: int
    ) -> bool:
        """Returns False when the driver or the device does not take them."""
        if self._batch is None:
            return False
        arrays = [array.ctypes.data for array in (targets, sources, sizes)]
        behind = [byref(self._failed)] if self._name == "cuMemcpyBatchAsync" else []
        for first in range(0, len(targets), at_once):
            code = self._batch(
                *(array + first * targets.itemsize for array in arrays),
                min(at_once, len(targets) - first),
                byref(self._attributes),
                byref(self._attribute_of),
                1,
                *behind,
                stream,
            )
            if code == _NOT_SUPPORTED:
                self._batch = None
                return False
            self._check(self._name, code)
        return True

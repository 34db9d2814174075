"""python -m tests.kv_transfer.gpu_self_check: what the CUDA driver does here, one line for each.

A child without torch maps a tensor of this process, copies it out and back, and is measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable

import msgspec
import numpy as np

from kv_transfer.base import KVCacheHandle
from kv_transfer.layout import KVGroup, KVLayout
from kv_transfer.memory.devices.choice import device_of
from kv_transfer.memory.devices.cuda_driver import cuda_driver
from kv_transfer.memory.devices.device import MemoryDevice
from kv_transfer.planes import Plane

NUM_LAYERS, NUM_BLOCKS, BLOCK_BYTES = 4, 128, 512 << 10
LAYER_BYTES = NUM_BLOCKS * BLOCK_BYTES
LAYOUT = KVLayout(
    groups=(
        KVGroup(
            layers=tuple(range(NUM_LAYERS)),
            planes=(Plane("kv", 1, BLOCK_BYTES // 16),),
            block_size=16,
            dtype="bfloat16",
        ),
    ),
    tp_size=1,
    model_hash="check",
)
POISON = 0xEE


def checked(name: str, check: Callable[[], object]) -> bool:
    try:
        print(f"ok    {name}: {check()}", flush=True)
    except Exception:
        print(f"FAIL  {name}\n{traceback.format_exc()}", flush=True)
        return False
    return True


class Child:
    """The transfer process's part: no torch here."""

    def __init__(self, handle: KVCacheHandle) -> None:
        self.handle = handle
        self.device: MemoryDevice

    def run(self) -> bool:
        checks = [
            ("child: context on the worker's GPU", self.open_device),
            ("child: map the cache by IPC", self.open_cache),
            ("child: pin host memory", self.pin),
            ("child: device to host", self.copy_out),
            ("child: host to device", self.copy_in),
            ("child: rows to rows", self.copy_rows),
            ("child: within the device", self.copy_within),
            ("child: many at once, in any order", self.copy_scattered),
            ("child: memory of its own", self.copy_through_own),
            ("child: let go", self.close),
        ]
        return all(checked(name, check) for name, check in checks)

    def open_device(self) -> str:
        started = time.perf_counter()
        self.device = device_of(self.handle)
        assert "torch" not in sys.modules
        return f"{(time.perf_counter() - started) * 1e3:.0f} ms, without torch"

    def open_cache(self) -> str:
        self.cache = self.device.open_cache(self.handle)
        self.stream = self.device.new_stream()
        return f"{self.cache.num_bytes >> 20} MiB"

    def pin(self) -> str:
        started = time.perf_counter()
        self.host = np.zeros(NUM_LAYERS * LAYER_BYTES, np.uint8)
        self.device.pin(self.host)
        return f"{self.host.nbytes >> 20} MiB in {(time.perf_counter() - started) * 1e3:.0f} ms"

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self.stream.copy(*np.array([[target], [source], [num_bytes]]))

    def timed(self, target: int, source: int, piece: int) -> str:
        """All layers, in copies of `piece` bytes, twice; the second is measured."""
        offsets = np.arange(0, NUM_LAYERS * LAYER_BYTES, piece)
        sizes = np.full_like(offsets, piece)
        for _ in range(2):
            started = time.perf_counter()
            self.stream.copy(target + offsets, source + offsets, sizes, in_portions=True)
            issued = time.perf_counter() - started
            self.stream.fence().wait()
            elapsed = time.perf_counter() - started
        each = issued / len(offsets) * 1e6
        rate = NUM_LAYERS * LAYER_BYTES / elapsed / 1e9
        return f"{piece >> 10} KiB {rate:.1f} GB/s, {each:.1f} us to issue"

    def copy_out(self) -> str:
        host = self.host.ctypes.data
        speeds = [self.timed(host, self.cache.address, piece << 10) for piece in (64, 512, 4096)]
        layers = self.host.reshape(NUM_LAYERS, -1)
        assert [int(layer[0]) for layer in layers] == [1, 2, 3, 4]
        assert all((layer == layer[0]).all() for layer in layers)
        return "; ".join(speeds)

    def copy_in(self) -> str:
        self.host += 10
        host = self.host.ctypes.data
        return "; ".join(
            self.timed(self.cache.address, host, piece << 10) for piece in (64, 512, 4096)
        )

    def copy_rows(self) -> str:
        """Row i of 256 bytes, every 1024 bytes, goes to every 512."""
        self.host[: 1 << 20] = np.arange(1 << 20, dtype=np.uint32).astype(np.uint8)
        self.stream.copy_rows(self.cache.address, 512, self.host.ctypes.data, 1024, 256, 1000)
        self.copy(self.host.ctypes.data + (2 << 20), self.cache.address, 512 * 1000)
        self.stream.fence().wait()
        got = self.host[2 << 20 :][: 512 * 1000].reshape(1000, 512)[:, :256]
        np.testing.assert_array_equal(got, self.host[: 1024 * 1000].reshape(1000, 1024)[:, :256])
        self.copy(self.cache.address, self.host.ctypes.data + (3 << 20), 1 << 20)
        self.stream.fence().wait()
        return "1000 rows"

    def copy_within(self) -> str:
        half = self.cache.address + 2 * LAYER_BYTES
        offsets = np.arange(0, LAYER_BYTES, BLOCK_BYTES)
        sizes = np.full_like(offsets, BLOCK_BYTES)
        for _ in range(2):
            started = time.perf_counter()
            self.stream.copy(half + offsets, half + LAYER_BYTES + offsets, sizes)
            self.stream.fence().wait()
            elapsed = time.perf_counter() - started
        return f"{LAYER_BYTES / elapsed / 1e9:.1f} GB/s on the same GPU"

    def copy_through_own(self) -> str:
        """A block goes from the host to it, and from there through the cache."""
        own = self.device.allocate(2 * BLOCK_BYTES)
        host = self.host.ctypes.data
        blocks = self.host[: 2 * BLOCK_BYTES].reshape(2, -1)
        blocks[0], blocks[1] = np.arange(BLOCK_BYTES, dtype=np.uint32).astype(np.uint8), POISON
        self.copy(own.address, host, BLOCK_BYTES)
        self.copy(self.cache.address, own.address, BLOCK_BYTES)
        self.copy(own.address + BLOCK_BYTES, self.cache.address, BLOCK_BYTES)
        self.copy(host + BLOCK_BYTES, own.address + BLOCK_BYTES, BLOCK_BYTES)
        self.stream.fence().wait()
        np.testing.assert_array_equal(blocks[1], blocks[0])
        own.close()
        return f"{own.num_bytes >> 10} KiB"

    def copy_scattered(self) -> str:
        """Every second block of layer 1, in random order, from numbered blocks of layer 0 and from
        the host; the blocks between them are poison."""
        address, host = self.cache.address, self.host.ctypes.data
        blocks = self.host[: 2 * LAYER_BYTES].reshape(2, NUM_BLOCKS, BLOCK_BYTES)
        before = blocks.copy()
        blocks[0], blocks[1] = np.arange(NUM_BLOCKS)[:, None], POISON
        self.copy(address, host, 2 * LAYER_BYTES)
        self.stream.fence().wait()
        order = np.random.default_rng(0).permutation(NUM_BLOCKS // 2)
        targets = address + LAYER_BYTES + 2 * BLOCK_BYTES * np.arange(len(order))
        sources = np.where(order % 2, address, host) + order * BLOCK_BYTES
        sizes = np.full_like(order, BLOCK_BYTES)
        sizes[0] = 4
        self.stream.copy(targets, sources, sizes)
        self.stream.fence().wait()
        blocks[:] = 0
        self.copy(host, address, 2 * LAYER_BYTES)
        self.stream.fence().wait()
        expected = np.full_like(blocks[1], POISON)
        expected[::2] = order[:, None]
        expected[0, 4:] = POISON
        np.testing.assert_array_equal(blocks[1], expected)
        np.testing.assert_array_equal(blocks[0, :, 0], np.arange(NUM_BLOCKS))
        blocks[:] = before
        self.copy(address, host, 2 * LAYER_BYTES)
        self.stream.fence().wait()
        return cuda_driver().copies.way

    def close(self) -> str:
        self.stream.close()
        self.cache.close()
        return "done"


def parent() -> bool:
    import torch

    from kv_transfer.memory.devices.cache_handle import handle_of_tensor
    from kv_transfer.producer.layer_marks import LayerMarks, StreamMarker

    print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(), flush=True)
    layers = torch.zeros((NUM_LAYERS, NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device="cuda")
    for layer in range(NUM_LAYERS):
        layers[layer] = layer + 1
    torch.cuda.synchronize()
    driver = cuda_driver()
    marks = LayerMarks.create(1)

    def mark_cost() -> str:
        marker = StreamMarker(marks, lambda: torch.cuda.current_stream().cuda_stream)
        for step in range(10):
            marker.mark(step, 0)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for step in range(1000):
            marker.mark(step, 0)
        cost = (time.perf_counter() - started) * 1e3
        torch.cuda.synchronize()
        assert marks.progress(999) is not None
        event = torch.cuda.Event()
        started = time.perf_counter()
        for _ in range(1000):
            event.record()
        record = (time.perf_counter() - started) * 1e3
        marker.close()
        return f"{cost:.2f} us on the host; an event's record takes {record:.2f} us"

    def run_child() -> str:
        handle = handle_of_tensor(0, LAYOUT, layers)
        child = subprocess.run(
            [sys.executable, "-m", "tests.kv_transfer.gpu_self_check", "child"],
            input=msgspec.json.encode(handle),
            timeout=100,
            check=False,
            stdout=subprocess.PIPE,
        )
        print(child.stdout.decode(), end="", flush=True)
        assert child.returncode == 0, f"exit code {child.returncode}"
        torch.cuda.synchronize()
        seen = [int(layers[layer, -1, -1]) for layer in range(NUM_LAYERS)]
        assert seen == [11, 12, 14, 14], seen
        return f"pid {os.getpid()} sees what the child wrote"

    def memory() -> str:
        total = driver.total_memory(0)
        assert total == torch.cuda.get_device_properties(0).total_memory
        return f"{total >> 30} GiB"

    checks: list[tuple[str, Callable[[], object]]] = [
        ("memory of the GPU", memory),
        ("driver", lambda: f"version {driver.version()}, {len(driver.device_uuids())} GPU(s)"),
        ("allocation behind a tensor", lambda: driver.allocation_of(layers.data_ptr())),
        ("marks written by the stream", mark_cost),
        ("another process", run_child),
    ]
    return all(checked(name, check) for name, check in checks)


def main() -> int:
    if sys.argv[1:] == ["child"]:
        return not Child(msgspec.json.decode(sys.stdin.buffer.read(), type=KVCacheHandle)).run()
    return not parent()


if __name__ == "__main__":
    sys.exit(main())

"""KV between caches on a GPU, with real transfer processes: over gRPC and by CUDA IPC."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from gpu_caches import SLOW_CYCLES, GpuRankCache, gpu_layout
from kv_nodes import FakeRequest, KVNode, poll_until, until_empty

from kv_transfer.config import KVTransferConfig
from kv_transfer.layout import KVLayout
from kv_transfer.metadata import StepProgress
from kv_transfer.producer.layer_marks import LayerMarks, StreamMarker

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

MakeNode = Callable[..., KVNode]
both_transports = pytest.mark.parametrize("transport", ["stream", "cuda_ipc,stream"])


@pytest.fixture
def make_node() -> Iterator[MakeNode]:
    nodes: list[KVNode] = []

    def make(role: str, shape: KVLayout, **settings: object) -> KVNode:
        config = KVTransferConfig(
            kv_role="kv_producer" if role == "prefill" else "kv_consumer",
            **{"chunk_bytes": 128 << 10, "staging_bytes": 32 << 20, **settings},
        )
        nodes.append(KVNode(config, shape, cache_type=GpuRankCache))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def slow() -> Iterator[None]:
    """Each layer of each step takes some 20 ms."""
    GpuRankCache.slow_cycles = SLOW_CYCLES
    yield
    GpuRankCache.slow_cycles = 0
    torch.cuda.synchronize()


def one_prompt(prefill: KVNode, decode: KVNode, seed: int, num_tokens: int, held: int = 0) -> None:
    """Moves one from export to release, in steps of 40 tokens; nothing waits for the device."""
    request = prefill.export(num_tokens)
    source = prefill.blocks.take(prefill.layout, num_tokens)
    target = decode.blocks.take(decode.layout, num_tokens)
    decode.pull(prefill.peer, request.transfer_id, num_tokens, target, first_token=held)
    launch(prefill, request, seed, num_tokens, source)
    torch.cuda.synchronize()
    prefill.connector.request_finished(request)
    poll_until(lambda: request.transfer_id in decode.done.received, prefill, decode)
    decode.check(seed, range(held, num_tokens), target)
    poll_until(lambda: request.transfer_id in prefill.done.released, prefill, decode)
    prefill.blocks.free += source
    decode.blocks.free += target
    for cache in decode.caches:
        assert isinstance(cache, GpuRankCache)
        fresh = GpuRankCache(cache.layout, cache.rank, 1)
        cache.tensor[:, target] = fresh.tensor[:, [0]]
        torch.cuda.synchronize()


def launch(
    prefill: KVNode, request: FakeRequest, seed: int, num_tokens: int, source: list[int]
) -> None:
    for first in range(0, num_tokens, 40):
        tokens = range(first, min(first + 40, num_tokens))
        prefill.step([(request, seed, tokens, source)])


def test_self_check() -> None:
    """The driver can do all that is asked of it here; its output names what fails."""
    check = [sys.executable, "-m", "tests.kv_transfer.gpu_self_check"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(check, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr


@both_transports
@pytest.mark.parametrize(
    ("tp_sizes", "block_sizes", "processes"),
    [((1, 1), (16, 16), (2, 1)), ((2, 1), (64, 16), (1, 2)), ((1, 2), (16, 64), (1, 1))],
    ids=str,
)
def test_every_byte_arrives(
    make_node: MakeNode,
    transport: str,
    tp_sizes: tuple[int, int],
    block_sizes: tuple[int, int],
    processes: tuple[int, int],
) -> None:
    prefill = make_node(
        "prefill",
        gpu_layout(tp_size=tp_sizes[0], block_size=block_sizes[0]),
        num_processes=processes[0],
        transports=transport,
    )
    decode = make_node(
        "decode",
        gpu_layout(tp_size=tp_sizes[1], block_size=block_sizes[1]),
        num_processes=processes[1],
        transports=transport,
    )
    for seed, (num_tokens, held) in enumerate([(100, 0), (129, 0), (127, 64)]):
        one_prompt(prefill, decode, seed, num_tokens, held)
    until_empty(prefill, decode)
    assert not decode.done.failed and not prefill.done.failed


def test_windows_of_a_gpu(make_node: MakeNode) -> None:
    """The first prompts come over the stream, until agents have found each other. All are larger
    than the windows."""
    pytest.importorskip("nixl_cu13")
    shape = gpu_layout()
    settings = {"transports": "nixl,stream", "nixl_window_bytes": 1 << 20}
    prefill, decode = (make_node(role, shape, **settings) for role in ("prefill", "decode"))
    for seed in range(200):
        sent = prefill.connector.counters["bytes_moved"]
        one_prompt(prefill, decode, seed, 129, held=32 * (seed % 2))
        until_empty(prefill, decode)
        if prefill.connector.counters["bytes_moved"] - sent < shape.block_bytes:
            break
    else:
        raise AssertionError("no prompt was read through NIXL")
    for seed in range(200, 210):
        one_prompt(prefill, decode, seed, 129)
    until_empty(prefill, decode)
    assert not decode.done.failed and not prefill.done.failed


@both_transports
def test_no_layer_is_read_before_its_kernels_ended(
    make_node: MakeNode, transport: str, slow: None
) -> None:
    prefill = make_node("prefill", gpu_layout(), transports=transport)
    decode = make_node("decode", gpu_layout(), transports=transport)
    request = prefill.export(64)
    source, target = (node.blocks.take(node.layout, 64) for node in (prefill, decode))
    decode.pull(prefill.peer, request.transfer_id, 64, target)
    poll_until(lambda: prefill.connector.counters["open_pulls"] > 0, prefill, decode)
    first_layer = torch.cuda.Event()
    torch.cuda._sleep(10 * SLOW_CYCLES)
    first_layer.record()
    prefill.step([(request, 1, range(64), source)])
    looks = 0
    while True:
        decode.poll()
        moved = decode.connector.counters["bytes_moved"]
        if first_layer.query():
            break
        looks += 1
        assert moved == 0
        time.sleep(0.001)
    assert looks > 10, "the launch must not have waited for the device"
    poll_until(lambda: request.transfer_id in decode.done.received, prefill, decode)
    decode.check(1, range(64), target)


def test_marks_appear_when_the_stream_gets_there() -> None:
    torch.zeros(1, device="cuda")
    marks = LayerMarks.create(2)
    marker = StreamMarker(marks, lambda: torch.cuda.current_stream().cuda_stream)
    reached = torch.cuda.Event()
    torch.cuda._sleep(10 * SLOW_CYCLES)
    marker.mark(41, 0)
    reached.record()
    seen = marks.progress(41)
    assert reached.query() or seen is None
    torch.cuda.synchronize()
    assert marks.progress(41) == StepProgress(41, 1)
    marker.mark(41, 1)
    torch.cuda.synchronize()
    assert marks.progress(41) == StepProgress(41, 2)
    marker.close()
    marks.close()


@both_transports
@pytest.mark.parametrize("aborting", ["prefill", "decode"])
def test_an_abort_while_kv_is_copied_frees_everything(
    make_node: MakeNode, aborting: str, transport: str, slow: None
) -> None:
    prefill = make_node("prefill", gpu_layout(), transports=transport)
    decode = make_node("decode", gpu_layout(), transports=transport)
    for seed in range(3):
        request = prefill.export(200)
        source, target = (node.blocks.take(node.layout, 200) for node in (prefill, decode))
        pulling = decode.pull(prefill.peer, request.transfer_id, 200, target)
        moved = decode.connector.counters["bytes_moved"]
        launch(prefill, request, seed, 200, source)
        poll_until(lambda: decode.connector.counters["bytes_moved"] > moved, prefill, decode)  # noqa: B023
        started = time.monotonic()
        node, own = (prefill, request) if aborting == "prefill" else (decode, pulling)
        assert node.connector.abort(own)
        poll_until(lambda: request.transfer_id in node.done.aborted, prefill, decode)  # noqa: B023
        until_empty(prefill, decode)
        assert time.monotonic() - started < 2.0
        torch.cuda.synchronize()
        prefill.blocks.free += source
        decode.blocks.free += target
    GpuRankCache.slow_cycles = 0
    for cache in decode.caches:
        assert isinstance(cache, GpuRankCache)
        cache.tensor[:] = GpuRankCache(cache.layout, cache.rank, 1).tensor[:, [0]]
    torch.cuda.synchronize()
    one_prompt(prefill, decode, 9, 100)


@both_transports
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_transfer_process_maps_everything_again(
    make_node: MakeNode, role: str, transport: str, slow: None
) -> None:
    prefill = make_node("prefill", gpu_layout(), transports=transport)
    decode = make_node("decode", gpu_layout(), transports=transport)
    victim = prefill if role == "prefill" else decode
    request = prefill.export(64)
    source, target = (node.blocks.take(node.layout, 64) for node in (prefill, decode))
    decode.pull(prefill.peer, request.transfer_id, 64, target)
    prefill.step([(request, 1, range(32), source)])
    poll_until(lambda: decode.connector.counters["bytes_moved"] > 0, prefill, decode)
    os.kill(victim.connector.process_pids[0], signal.SIGKILL)
    poll_until(lambda: request.transfer_id in decode.done.failed, prefill, decode)
    ended = prefill.done.failed if role == "prefill" else prefill.done.aborted
    poll_until(lambda: request.transfer_id in ended, prefill, decode)
    counters = victim.connector
    poll_until(lambda: counters.counters["process_restarts"] == 1, prefill, decode)
    poll_until(lambda: counters.counters["processes_ready"] == 1, prefill, decode)
    until_empty(prefill, decode)
    GpuRankCache.slow_cycles = 0
    one_prompt(prefill, decode, 2, 64)
    until_empty(prefill, decode)

"""A capture that fails names the step and the way without it. The device is a fake here; on a real
one see test_gpu_start.py."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from engine.contracts.steps.step_launches import GraphKey, StepLaunches
from engine.worker.graphs import cuda_graphs
from engine.worker.graphs.cuda_graphs import CudaGraphManager, GraphCaptureError

NOT_ALLOWED = RuntimeError("operation not permitted when stream is capturing")


class FakeGraph:
    """`capture_end` fails once the capture is broken, as CUDA's does."""

    broken = False

    def capture_begin(self, **how: object) -> None:
        assert how["capture_error_mode"] == "thread_local"
        FakeGraph.broken = False

    def capture_end(self) -> None:
        if FakeGraph.broken:
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture(autouse=True)
def _fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(synchronize=lambda: None)
    cuda = SimpleNamespace(
        CUDAGraph=FakeGraph,
        Stream=lambda device: stream,
        stream=lambda stream: nullcontext(),
        graph_pool_handle=lambda: (0, 1),
        synchronize=lambda device: None,
        memory_reserved=lambda device: 0,
    )
    monkeypatch.setattr(cuda_graphs.torch, "cuda", cuda)


def capture(fails_at: GraphKey, error: Exception, is_warm_up: bool = False) -> None:
    """Captures steps with decodes of 1 and 2 requests, and one with a prompt."""
    runs: list[GraphKey] = []

    def run(key: GraphKey) -> None:
        runs.append(key)
        if key == fails_at and runs.count(key) == (1 if is_warm_up else 2):
            FakeGraph.broken = True
            raise error

    launches = StepLaunches({1: (1, 2)}, (GraphKey(2, 16, True),))
    manager = CudaGraphManager(launches, torch.device("cuda"))
    manager.capture(run, lambda fraction: None)


@pytest.mark.parametrize("is_warm_up", [False, True])
@pytest.mark.parametrize(
    ("key", "words"),
    [
        (GraphKey.of_decodes(2, 1, False), ["decodes of 2 requests", "cudagraph_capture_sizes"]),
        (GraphKey(2, 16, True), ["16 tokens of prompts of 2 requests", "disabled_fast_paths"]),
    ],
)
def test_the_step_the_cause_and_the_cure_are_named(
    key: GraphKey, words: list[str], is_warm_up: bool
) -> None:
    with pytest.raises(GraphCaptureError) as caught:
        capture(key, NOT_ALLOWED, is_warm_up)
    for word in [*words, str(NOT_ALLOWED), "enforce_eager"]:
        assert word in str(caught.value)
    assert caught.value.__cause__ is NOT_ALLOWED


def test_too_little_memory_is_left_to_who_knows_the_cure() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        capture(GraphKey.of_decodes(1, 1, True), torch.OutOfMemoryError("CUDA out of memory"))

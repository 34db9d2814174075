"""The setting that says over which transports KV may go, and in which order they are tried."""

from __future__ import annotations

import pytest

from kv_transfer.config import KVTransferConfig


@pytest.mark.parametrize(
    ("text", "on_gpu", "on_cpu"),
    [
        ("auto", ("cuda_ipc", "stream"), ("stream",)),
        ("fastest", ("cuda_ipc", "stream"), ("stream",)),
        ("stream", ("stream",), ("stream",)),
        ("cuda_ipc, stream", ("cuda_ipc", "stream"), ("cuda_ipc", "stream")),
    ],
)
def test_what_may_be_said(text: str, on_gpu: tuple[str, ...], on_cpu: tuple[str, ...]) -> None:
    config = KVTransferConfig(kv_role="kv_producer", transports=text)
    assert config.transports_for(on_gpu=True) == on_gpu
    assert config.transports_for(on_gpu=False) == on_cpu


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "name each of"),
        ("grpc", "name each of"),
        ("stream,stream", "once at most"),
        ("auto,stream", "once at most"),
        ("cuda_ipc", "the last transport is stream"),
        ("stream,cuda_ipc", "the last transport is stream"),
    ],
)
def test_what_may_not_is_refused_with_the_cure(text: str, why: str) -> None:
    config = KVTransferConfig(kv_role="kv_producer", transports=text)
    with pytest.raises(ValueError, match=why):
        config.transports_for(on_gpu=True)

"""A node of two roles answers probes before it has read its model."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Literal

import aiohttp
import pytest

import role_node.server as role_server
from engine.node.settings.engine_settings import SettingsError
from role_node.config import RoleNodeSettings


@pytest.mark.asyncio
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_probes_answer_while_the_model_is_read(
    role: Literal["prefill", "decode"], demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    loop, may_end = asyncio.get_running_loop(), threading.Event()

    def read(settings: RoleNodeSettings) -> None:
        loop.call_soon_threadsafe(begun.set_result, settings.metrics_port)
        may_end.wait(60)
        raise SettingsError("the model cannot be read")

    monkeypatch.setattr(role_server, "read_model", read)
    settings = RoleNodeSettings(
        _cli_parse_args=[],  # type: ignore[call-arg]
        model=str(demo_checkpoint),
        device="cpu",
        role=role,
        port=0,
        grpc_port=0,
        metrics_port=0,
    )
    node = asyncio.create_task(role_server.serve(settings))
    try:
        port = await asyncio.wait_for(begun, 60)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            async with client.get("/health/live") as answer:
                assert answer.status == 200
            async with client.get("/ready") as answer:
                assert answer.status == 503
                assert "configuration is read" in await answer.text()
    finally:
        may_end.set()
    with pytest.raises(SettingsError):
        await node

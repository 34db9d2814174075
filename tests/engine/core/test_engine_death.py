"""Somebody dies. Everybody must learn it, with the reason, and no process may stay behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import uvloop

from engine.errors import EngineDeadError
from engine.frontend.async_llm import AsyncLLM
from engine.messages import LoadProgress
from tests.engine.core.tiny_engine import make_request, tiny_config, until
from tests.processes import descendants, is_gone

ROOT = Path(__file__).resolve().parents[3]


@asynccontextmanager
async def doomed_engine(tp_size: int) -> AsyncIterator[AsyncLLM]:
    """Whatever the test does to it, afterwards it is dead and all its processes are gone."""
    llm = await AsyncLLM.start(tiny_config(tp_size))
    try:
        yield llm
        assert llm.is_dead
        with pytest.raises(EngineDeadError):
            llm.generate(make_request("late", 1))
        with pytest.raises(EngineDeadError):
            await llm.reset_prefix_cache()
    finally:
        await llm.shutdown()
    pids = [llm.core_pid, *llm.ready.worker_pids]
    await until(lambda: all(is_gone(pid) for pid in pids), "the end of all processes")


async def _reason(llm: AsyncLLM, kill: Callable[[], Awaitable[None]]) -> str:
    """Returns what the streams are told that ran when `kill` struck."""

    async def stream(index: int) -> str:
        try:
            async for _ in llm.generate(make_request(f"r{index}", index, max_tokens=80)):
                started.set()
        except EngineDeadError as error:
            return str(error)
        return "completed"

    started = asyncio.Event()
    streams = [asyncio.create_task(stream(i)) for i in range(8)]
    await started.wait()
    await kill()
    reasons = set(await asyncio.wait_for(asyncio.gather(*streams), 60)) - {"completed"}
    assert len(reasons) == 1
    assert await llm.wait_dead() in reasons
    return reasons.pop()


async def test_killed_worker() -> None:
    """A worker dies that answers no steps."""
    async with doomed_engine(tp_size=2) as llm:

        async def kill() -> None:
            os.kill(llm.ready.worker_pids[1], signal.SIGKILL)

        reason = await _reason(llm, kill)
        assert reason.startswith("worker 1 was killed by SIGKILL")


async def test_killed_worker_of_an_idle_engine() -> None:
    async with doomed_engine(tp_size=1) as llm:
        os.kill(llm.ready.worker_pids[0], signal.SIGKILL)
        assert await asyncio.wait_for(llm.wait_dead(), 60) == "worker 0 was killed by SIGKILL"


def test_killed_core_under_uvloop() -> None:
    """Runs on the event loop of the node servers: it watches descriptors in its own way."""

    async def run() -> None:
        async with doomed_engine(tp_size=1) as llm:

            async def kill() -> None:
                os.kill(llm.core_pid, signal.SIGKILL)

            assert await _reason(llm, kill) == "the engine core was killed by SIGKILL"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def test_terminated_core_ends_its_workers() -> None:
    async with doomed_engine(tp_size=1) as llm:
        os.kill(llm.core_pid, signal.SIGTERM)
        reason = await asyncio.wait_for(llm.wait_dead(), 60)
        assert reason == "the engine core ended with exit code 0"


async def test_checkpoint_that_cannot_be_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The reason is enough: nobody need see where in the code it was noticed."""
    config = tiny_config(path=str(tmp_path / "nowhere"), load_format="safetensors")
    async with nothing_started_is_left():
        with pytest.raises(EngineDeadError, match=r"worker 0: CheckpointError: .*nowhere"):
            await AsyncLLM.start(config)
    said = capfd.readouterr().err
    assert "nowhere" in said and "Traceback" not in said


async def test_start_that_is_called_off() -> None:
    loading = asyncio.Event()

    def on_progress(progress: LoadProgress) -> None:
        loading.set()

    async with nothing_started_is_left():
        start = asyncio.create_task(AsyncLLM.start(tiny_config(), on_progress))
        await loading.wait()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start


async def test_children_end_with_the_node_server() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.engine.core.engine_parent",
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        pids = json.loads(await process.stdout.readline())
        assert len(pids) == 2
    finally:
        process.kill()
        await process.wait()
    await until(lambda: all(is_gone(pid) for pid in pids), "the end of all processes")


@asynccontextmanager
async def nothing_started_is_left() -> AsyncIterator[None]:
    """Every process that the block starts ends with it, and somebody waits for its end."""
    before = descendants(os.getpid())
    yield
    await until(lambda: descendants(os.getpid()) <= before, "the end of all children")
    left = {process.pid for process in psutil.Process().children()} - before
    assert not left, "nobody waited for these"

"""Somebody dies. Everybody must learn it, with the reason, and no process may stay behind."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from msgspec import to_builtins

from engine.contracts.errors import EngineDeadError
from engine.contracts.messages import LoadProgress
from engine.contracts.request_spec import RequestSpec
from engine.core.core_proc import _REPORT_TIMEOUT_S
from engine.frontend import crash_reporter
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.input_processor import GenerationRequest
from engine.inspection_config import InspectionConfig
from engine.node.status import NodeStatus
from host.stack_dump import dump_stacks
from tandem_pb import node_pb2
from tests.engine.core.pd_pair import tokens_of
from tests.engine.core.tiny_engine import NUM_BLOCKS, Oracle, make_request, tiny_config, until
from tests.processes import descendants, is_gone, is_store, stopped

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def patient_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets processes take their time to say what they know: those of a busy machine are late."""
    monkeypatch.setattr(crash_reporter, "_DESCRIBE_TIMEOUT_S", 30.0)
    monkeypatch.setattr(crash_reporter, "dump_stacks", partial(dump_stacks, timeout_s=30.0))


@asynccontextmanager
async def doomed_engine(tp_size: int, folder: Path, num_stages: int = 1) -> AsyncIterator[AsyncLLM]:
    """Whatever the test does to it, afterwards it is dead, all its processes are gone, and there is
    one report of it in `folder`."""
    config = tiny_config(tp_size)
    parallel = replace(config.parallel, pipeline_parallel_size=num_stages)
    inspection = InspectionConfig(crash_report_dir=str(folder))
    llm = await AsyncLLM.start(replace(config, parallel=parallel, inspection=inspection))
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
    assert [str(path) for path in folder.iterdir()] == [llm.crash_report]


def report_of(llm: AsyncLLM) -> dict[str, Any]:
    """Returns the report, in which whatever is always there is there."""
    report: dict[str, Any] = json.loads(Path(llm.crash_report).read_text(encoding="utf-8"))
    assert report["reason"] == llm.dead_reason
    assert report["engine_id"] == llm.config.engine_id
    assert {"tandem", "torch", "python"} <= report["versions"].keys()
    settings = report["settings"]
    assert settings["parallel"] == to_builtins(llm.config.parallel)
    assert llm.config.parallel.num_ranks == len(llm.ready.worker_pids)
    assert report["memory"]["host_MemAvailable_kib"] > 0
    numbers = [step["step_id"] for step in report["steps"]]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert all(step["num_tokens"] >= step["num_rows"] >= 1 for step in report["steps"])
    return report


def stack_of(report: dict[str, Any], name: str) -> str:
    """Returns the stacks of a process, which has given some."""
    (found,) = [one for one in report["processes"] if one["name"] == name]
    assert found["rss_kib"] > 0
    return "\n".join(found["stack"])


def hashes_of(num_requests: int) -> set[str]:
    return {hashlib.sha256(f"r{i}".encode()).hexdigest()[:16] for i in range(num_requests)}


async def _reason(llm: AsyncLLM, victim: int, worker: int) -> str:
    """Returns what streams are told when `victim` is killed in the middle of a step, which does not
    end before, as `worker` is stopped."""

    async def stream(index: int) -> str:
        async for _ in llm.generate(make_request(f"r{index}", index, max_tokens=80)):
            pass
        return "completed"

    await until(lambda: llm.stats.num_running == 0, "an idle engine")
    with stopped(worker):
        streams = [asyncio.create_task(stream(i)) for i in range(8)]
        await until(lambda: llm.stats.num_running > 0, "a step that does not end")
        os.kill(victim, signal.SIGKILL)
        told = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 60)
    assert all(isinstance(one, EngineDeadError) for one in told), told
    (reason,) = {str(one) for one in told}
    assert await llm.wait_dead() == reason
    return reason


async def test_killed_worker(tmp_path: Path, oracle: Oracle) -> None:
    """Two stages of two ranks compute as one process does, until a worker dies that answers no
    steps. The report has what the engine core knows, and the stacks of all that live."""
    async with doomed_engine(2, tmp_path, num_stages=2) as llm:
        answers = [tokens_of(llm.generate(make_request(f"s{seed}", seed))) for seed in range(8)]
        assert await asyncio.gather(*answers) == [oracle.tokens(seed) for seed in range(8)]
        victim = llm.ready.worker_pids[1]
        reason = await _reason(llm, victim, victim)
        assert reason.startswith("worker 1 was killed by SIGKILL")
        assert llm.crash_report.startswith(str(tmp_path)) and llm.crash_report not in reason
    report = report_of(llm)
    assert report["core_answered"]
    engine = report["engine"]
    assert {one["request"] for one in engine["requests"]} <= hashes_of(8)
    rows = [one for one in engine["requests"] if one.get("row") is not None]
    assert len(rows) == llm.config.scheduler.max_num_seqs - engine["queues"]["rows_free"] > 0
    assert all(one["num_prompt_tokens"] > 0 for one in rows)
    assert engine["blocks"]["total"] == NUM_BLOCKS > engine["blocks"]["free"]
    assert report["steps"][-1]["seconds"] is None, "the step in which it died"
    assert "core_proc.py" in stack_of(report, "the engine core")
    failed = report["exceptions"].get("worker 0", [])
    assert failed or "worker_proc.py" in stack_of(report, "worker 0"), (
        "it missed its peer, or waits"
    )
    assert not failed or "RankLostError" in [link["type"] for link in failed]
    assert "_write" in stack_of(report, "the node server")
    frames = report["exceptions"]["the engine core"][-1]["frames"]
    assert any("process_executor.py" in frame for frame in frames)


async def test_killed_worker_of_an_idle_engine(tmp_path: Path) -> None:
    async with doomed_engine(1, tmp_path) as llm:
        async for _ in llm.generate(make_request("before", 2)):
            pass
        os.kill(llm.ready.worker_pids[0], signal.SIGKILL)
        assert await asyncio.wait_for(llm.wait_dead(), 60) == "worker 0 was killed by SIGKILL"
    report = report_of(llm)
    assert report["engine"]["requests"] == []
    assert all(step["seconds"] > 0 for step in report["steps"])


async def test_a_core_that_nothing_reports_on_ends_at_once() -> None:
    """It waits for no report, so that its node starts again seconds earlier."""
    llm = await AsyncLLM.start(tiny_config())
    try:
        os.kill(llm.ready.worker_pids[0], signal.SIGKILL)
        await llm.wait_dead()
        async with asyncio.timeout(_REPORT_TIMEOUT_S - 1):
            await until(lambda: is_gone(llm.core_pid), "the end of the engine core")
    finally:
        await llm.shutdown()


def test_killed_core_under_uvloop(tmp_path: Path) -> None:
    """Runs on the event loop of the node servers: it watches descriptors in its own way. The last
    steps are known without the core."""

    async def run() -> AsyncLLM:
        async with doomed_engine(1, tmp_path) as llm:
            reason = await _reason(llm, llm.core_pid, llm.ready.worker_pids[0])
            assert reason == "the engine core was killed by SIGKILL"
        return llm

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = report_of(runner.run(run()))
    assert (report["core_answered"], report["engine"]) == (False, None)
    assert 0 < report["num_open_requests"] == len(report["open_requests"]) <= 8
    assert {one["request"] for one in report["open_requests"]} <= hashes_of(8)
    assert "_write" in stack_of(report, "the node server")


async def test_an_exception_in_a_model_is_told_with_where_it_came_from(tmp_path: Path) -> None:
    """Past all checks, a token comes that the embedding does not have."""
    async with doomed_engine(1, tmp_path) as llm:
        unknown = GenerationRequest("r0", RequestSpec([1, 987654321, 2]))
        with pytest.raises(EngineDeadError, match="worker 0: IndexError"):
            async for _ in llm.generate(unknown):
                pass
    report = report_of(llm)
    (link,) = report["exceptions"]["worker 0"]
    assert link["type"] == "IndexError"
    assert any("engine/models/" in frame for frame in link["frames"])
    (step,) = report["steps"]
    assert (step["num_rows"], step["num_tokens"], step["seconds"]) == (1, 3, None)
    assert "987654321" not in Path(llm.crash_report).read_text(encoding="utf-8")


@pytest.mark.parametrize("victim", ["the engine core", "worker 0"])
async def test_a_frozen_process_is_given_up_by_the_watchdog(
    victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_core = victim == "the engine core"
    if is_core:
        monkeypatch.setattr(crash_reporter, "_DESCRIBE_TIMEOUT_S", 0.1)
    async with doomed_engine(1, tmp_path) as llm:
        status = NodeStatus(llm, node_pb2.NODE_ROLE_DECODE, stuck_after_s=1.2, frozen_after_s=1.1)
        await tokens_of(llm.generate(make_request("before", 3)))
        children = psutil.Process(llm.core_pid).children()
        stores = {child.pid for child in children if is_store(child.pid)}
        pid = llm.core_pid if is_core else llm.ready.worker_pids[0]
        os.kill(pid, signal.SIGSTOP)
        stream = llm.generate(make_request("r0", 3))
        async with asyncio.timeout(60):
            while not llm.is_dead:
                status.give_up_if_stuck()
                await asyncio.sleep(0.02)
        with pytest.raises(EngineDeadError):
            async for _ in stream:
                pass
        assert status.fault().startswith("the engine has died: ")
        assert llm.crash_report and llm.crash_report not in status.fault()
        async with asyncio.timeout(60):
            while not Path(llm.crash_report).exists():
                await asyncio.sleep(0.02)
        os.kill(pid, signal.SIGCONT)
    report = report_of(llm)
    assert report["core_answered"] is not is_core
    assert [one["request"] for one in report["open_requests"]] == list(hashes_of(1))
    processes = [one for one in report["processes"] if one["pid"] not in stores]
    frozen = [one for one in processes if one["pid"] == pid]
    assert [(one["state"], one["stack"]) for one in frozen] == [("T", [])]
    stacks = [one for one in processes if one["stack"]]
    assert len(stacks) == len(processes) - 1 == 2


async def test_terminated_core_ends_its_workers(tmp_path: Path) -> None:
    async with doomed_engine(1, tmp_path) as llm:
        os.kill(llm.core_pid, signal.SIGTERM)
        reason = await asyncio.wait_for(llm.wait_dead(), 60)
        assert reason == "the engine core ended with exit code 0"
    assert json.loads(Path(llm.crash_report).read_text(encoding="utf-8"))["steps"] == []


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
    children = {process.pid for process in psutil.Process().children()}
    left = {pid for pid in children - before if not is_store(pid)}
    assert not left, "nobody waited for these"

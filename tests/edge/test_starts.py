"""Services start although nobody can be told, and say what is wrong when they cannot start."""

from __future__ import annotations

import asyncio
import gc
import importlib
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cli.local_cluster.cluster import free_ports
from edge.program import collect_early
from edge.tracing.context import TraceContext
from edge.tracing.export.file import TraceFile
from edge.tracing.span import Span
from edge.tracing.tracer import Tracer
from tests.router.processes import ROOT, run_module

FULL = Path("/dev/full")


@pytest.fixture
def full_disk() -> Iterator[Any]:
    with FULL.open("w") as file:
        yield file


def test_a_service_that_cannot_tell_its_supervisor_goes_on_and_ends_well(full_disk: Any) -> None:
    code = (
        "from edge.supervisor import tell_supervisor\n"
        "from edge.program import leave\n"
        "tell_supervisor('progress'); tell_supervisor('ready'); leave(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=full_disk,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "'ready' cannot be written to standard output" in done.stderr
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr


async def test_a_router_whose_standard_output_is_full_serves(full_disk: Any) -> None:
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}/health"
    async with (
        run_module("router", "--port", str(port), stdout=full_disk) as process,
        aiohttp.ClientSession() as client,
    ):
        is_up = False
        while not is_up and process.returncode is None:
            try:
                async with client.get(url) as response:
                    is_up = response.status == 200
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)
        process.terminate()
        assert await process.wait() == 0
        assert is_up


@pytest.mark.parametrize("service", ["router", "decode_node", "prefill_node"])
def test_a_trace_file_in_a_missing_folder_is_named_before_anything_is_loaded(
    service: str,
    demo_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "missing" / "traces"
    args = ["--port", "0", "--trace-file", str(file)]
    if service != "router":
        args += ["--model", str(demo_checkpoint)]
        monkeypatch.setattr(f"{service}.server.start_engine", None)
    monkeypatch.setattr(sys, "argv", [service, *args])
    assert importlib.import_module(f"{service}.main").main() in (1, 2)
    said = capsys.readouterr().err
    assert str(file) in said and "--trace-file" in said
    assert "Traceback" not in said


def test_traces_that_cannot_be_written_end_nothing() -> None:
    tracer = Tracer(TraceFile(FULL, {}))
    for _ in range(2):
        tracer.write(TraceContext.from_headers({}), [Span("request", 1.0, 2.0)])
    assert tracer.counts()["file"] == 2


def test_what_has_ended_since_is_collected_when_a_program_settles_again() -> None:
    """A role that a node has given up leaves cycles, which were there when it was ready. What was
    frozen before is left out the first time. In a process of its own, which has few objects."""
    code = """
import gc, weakref
from edge.program import settle

class Life:
    def __init__(self):
        self.itself = self

def tell():
    print(*[name for name, life in ended.items() if life() is None])

imported = Life()
gc.freeze()
starting, serving = Life(), Life()
ended = {name: weakref.ref(globals()[name]) for name in ("imported", "starting", "serving")}
del imported, starting
settle()
tell()
del serving
gc.collect()
tell()
settle()
tell()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    told = ["starting", "starting", "imported starting serving"]
    assert done.stdout.splitlines() == told, done.stderr


class Link:
    """Is one of a cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def thresholds() -> Iterator[Callable[[int, int], None]]:
    """Sets them, with nothing young or middle-aged, until the test has ended."""
    before = gc.get_threshold()

    def begin(young: int, middle: int) -> None:
        gc.collect()
        gc.set_threshold(young, middle, 1000)

    yield begin
    gc.enable()
    gc.set_threshold(*before)


def test_garbage_is_collected_early_from_half_of_what_is_collected_anyway(
    thresholds: Callable[[int, int], None],
) -> None:
    thresholds(10_000, 1000)
    ended = weakref.ref(Link())
    collect_early()
    assert ended() is not None, "few objects are young"
    kept = [Link() for _ in range(6000)]
    collect_early()
    assert ended() is None
    assert len(kept) == 6000


def test_what_is_no_longer_young_is_collected_early_too(
    thresholds: Callable[[int, int], None],
) -> None:
    thresholds(10_000, 10)
    link = Link()
    gc.collect(0)
    ended = weakref.ref(link)
    del link
    for _ in range(5):
        gc.collect(0)
        collect_early()
    assert ended() is None


def test_nothing_is_collected_early_where_nothing_is_collected(
    thresholds: Callable[[int, int], None],
) -> None:
    thresholds(1, 1)
    gc.disable()
    ended = weakref.ref(Link())
    kept = [Link() for _ in range(100)]
    collect_early()
    assert ended() is not None
    assert len(kept) == 100

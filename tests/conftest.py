"""Shared by all tests: one torch thread, no GPU tests without a GPU, one demo checkpoint path,
examples that do not depend on luck or on a clock, what may run at the same time, and how programs
start."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forked_programs, quick_imports

quick_imports.hide_here()
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Else gRPC starts its threads again in a child between fork and exec, where they may abort it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

ROOT = Path(__file__).resolve().parent.parent


def _examples_without_luck() -> None:
    """Draws the same examples in every run, however slow the machine is;
    `HYPOTHESIS_PROFILE=search` draws new ones, for whoever looks for faults. Where only GPU tests
    run there may be no Hypothesis.
    """
    try:
        from hypothesis import HealthCheck, settings
    except ModuleNotFoundError:
        return
    any_speed: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("same", derandomize=True, database=None, **any_speed)
    settings.register_profile("search", **any_speed)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


_examples_without_luck()


def _num_cuda_devices() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Ours for `make test` (`--dist loadscope`); what else is asked for is xdist's own."""
    if config.getoption("dist") != "loadscope":
        return None
    from tests.file_scheduling import FileScheduling

    return FileScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collects no garbage while all tests are imported: there is none, and looking for it takes as
    long as the imports. What was imported is never looked at again."""
    gc.disable()
    try:
        return (yield)
    finally:
        _let_servers_stop_soon()
        gc.freeze()
        gc.set_threshold(*RARELY)
        gc.enable()


class _QuickAsyncio:
    """Stands for `asyncio` in uvicorn, whose servers look every tenth of a second whether they
    shall stop, and then sleep for another: in tests they look every hundredth."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay: float) -> None:
        await asyncio.sleep(delay / 10)


def _let_servers_stop_soon() -> None:
    """Does so where tests have imported uvicorn. Programs that they start are not affected."""
    if (server := sys.modules.get("uvicorn.server")) is not None:
        vars(server)["asyncio"] = _QuickAsyncio()


RARELY = 10_000, 20, 20
"""When garbage is looked for while tests run (`gc.set_threshold`). By Python's own numbers that
takes a thirtieth of their time. There is little of it; tests that count it ask for a collection."""
_thaw = gc.unfreeze
_is_thawed = False


def _unfreeze() -> None:
    global _is_thawed
    _is_thawed = True
    _thaw()


def pytest_configure(config: pytest.Config) -> None:
    forked_programs.install(binds=True)
    if _spreads_the_suite(config):
        from tests import forked_workers

        forked_workers.install()
    # Who ends a run by SIGTERM leaves as little behind as by Ctrl-C: what tests began, they end.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    gc.unfreeze = _unfreeze


def _spreads_the_suite(config: pytest.Config) -> bool:
    """Returns whether this process starts workers of pytest-xdist that run all tests."""
    spreads = config.getoption("dist", "no") == "loadscope" and config.getoption("tx")
    return spreads and [Path(argument).resolve() for argument in config.args] == [ROOT / "tests"]


SET_FOR_LIBRARIES = "UCX_NET_DEVICES", "UCX_LOG_LEVEL", "NIXL_LOG_LEVEL", "MC_LOG_LEVEL"
"""Variables that transports and stores set in their process before they load a library. What one
test has set would hold for all behind it."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Starts programs as forks of what is imported already, but for tests of the start itself, and
    takes back what a test has set for libraries."""
    is_real = item.get_closest_marker("real_start") is not None
    before = {name: os.environ[name] for name in SET_FOR_LIBRARIES if name in os.environ}
    try:
        with forked_programs.real_starts() if is_real else contextlib.nullcontext():
            return (yield)
    finally:
        for name in SET_FOR_LIBRARIES:
            os.environ.pop(name, None)
        os.environ.update(before)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Freezes again what a test has thawed, by itself or as programs of ours do: each collection
    that is asked for later would look at all imports of all tests for a second. Programs of ours
    also ask for more collections than tests need."""
    try:
        return (yield)
    finally:
        gc.set_threshold(*RARELY)
        global _is_thawed
        if _is_thawed:
            _is_thawed = False
            gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _skip_without_gpu(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests.file_scheduling import turn

        items.sort(key=lambda item: turn(item.path))


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    gpu_items = [
        i for i in items if i.get_closest_marker("gpu") or i.get_closest_marker("multi_gpu")
    ]
    if not gpu_items:
        return
    devices = _num_cuda_devices()
    for item in gpu_items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1
        if devices < needed:
            item.add_marker(
                pytest.mark.skip(reason=f"needs {needed} CUDA device(s), has {devices}")
            )


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Keeps a measurement of processor time from paying for what other tests have left behind."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def demo_checkpoint() -> Path:
    """Returns the checkpoint that ships with the repository."""
    return ROOT / "cli" / "demo_checkpoint"

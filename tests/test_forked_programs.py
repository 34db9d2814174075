"""A program that is a fork does what one that Python has started does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kv_transfer.memory.pool import store_environment
from kv_transfer.transports.nixl import environment
from tests import forked_programs
from tests.network_namespaces import switched
from tests.processes import descendants, is_alive, is_store

TANDEM = [sys.executable, "-m", "cli"]


def run(*args: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TANDEM, *args], capture_output=True, text=True, timeout=60, **more)


@pytest.mark.parametrize("args", [["--version"], ["fly"]])
def test_both_say_the_same_and_end_the_same_way(args: list[str]) -> None:
    forked = run(*args)
    with forked_programs.real_starts():
        real = run(*args)
    assert (forked.returncode, forked.stdout, forked.stderr) == (
        real.returncode, real.stdout, real.stderr,
    )  # fmt: skip


def start(*args: str, **more: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more
    )


def facts(process: subprocess.Popen[bytes]) -> dict[str, object]:
    with psutil.Process(process.pid).oneshot():
        seen = psutil.Process(process.pid)
        return {
            "parent": seen.ppid(),
            "command": seen.cmdline(),
            "folder": seen.cwd(),
            "session": os.getsid(process.pid),
            "group": os.getpgid(process.pid),
        }


def has_started(pid: int) -> bool:
    """Returns whether a store forks programs for this process, and has. A store that begins has its
    parent's command for a moment."""
    children = psutil.Process(pid).children()
    return bool(descendants(pid)) and any(is_store(child.pid) for child in children)


def test_others_see_a_child_of_the_tests_with_its_command(tmp_path: Path) -> None:
    """A session of its own leads a group of its own."""
    now, then = map(forked_programs._looked_at, (os.environ, forked_programs._env))
    assert now == then, "a test before this one has left variables: all programs start anew since"
    with start("cli", "up", "--port", "0", cwd=tmp_path, start_new_session=True) as process:
        try:
            deadline = time.monotonic() + 60
            while not has_started(process.pid) and time.monotonic() < deadline:
                assert is_alive(process.pid), process.communicate()
                time.sleep(0.02)
            assert facts(process) == {
                "parent": os.getpid(),
                "command": [*TANDEM, "up", "--port", "0"],
                "folder": str(tmp_path),
                "session": process.pid,
                "group": process.pid,
            }
            children = psutil.Process(process.pid).children()
            assert has_started(process.pid)
        finally:
            process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    while any(is_alive(child.pid) for child in children):
        time.sleep(0.02)


ASK_OF_THE_END = """
import ctypes
asked = ctypes.c_int()
assert ctypes.CDLL(None).prctl(2, ctypes.byref(asked), 0, 0, 0) == 0  # PR_GET_PDEATHSIG
print("ends by", asked.value)
"""


@pytest.mark.parametrize("is_fork", [True, False])
def test_what_tests_start_ends_with_them(is_fork: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(forked_programs.PROGRAMS, "timeit", "timeit")
    command = [sys.executable, "-m", "timeit", "-n", "1", "-r", "1", ASK_OF_THE_END]
    env = dict(os.environ) if is_fork else {**os.environ, "PYTHONWARNINGS": "error"}
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, check=True).stdout
    assert f"ends by {signal.SIGKILL.value}\n" in said


WAITS = """
import pathlib, signal, subprocess, pytest

@pytest.fixture
def program(tmp_path):
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()

def test(program):
    print("id", program.pid, flush=True)
    signal.pause()
"""


def test_a_run_that_is_terminated_ends_what_it_started(tmp_path: Path) -> None:
    file = tmp_path / "test_waits.py"
    file.write_text(WAITS)
    options = "-q", "-s", "-p", "tests.conftest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with start("pytest", *options, str(file), env=env) as run_of_tests:
        assert run_of_tests.stdout is not None
        said = next(line for line in run_of_tests.stdout if line.startswith(b"id "))
        run_of_tests.terminate()
        assert run_of_tests.wait(60) == pytest.ExitCode.INTERRUPTED
    assert not is_alive(int(said.split()[1]))


def test_variables_that_imports_look_at_need_a_real_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--version").returncode == 0
    asked: list[object] = []
    monkeypatch.setattr(forked_programs.Store, "start", lambda *given: asked.append(given))
    assert run("--version", env={**os.environ, "PYTHONWARNINGS": "error"}).returncode == 0
    assert not asked


def test_a_fork_has_the_network_of_the_thread_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a real start has. The store may have begun in another."""
    monkeypatch.setitem(forked_programs.PROGRAMS, "timeit", "timeit")
    code = "import os; print('has', os.readlink('/proc/self/ns/net'))"
    command = [sys.executable, "-m", "timeit", "-n", "1", "-r", "1", code]

    def network() -> str:
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        return said.splitlines()[0]

    with switched("a") as switch:
        at_home = network()
        with switch.on("a"):
            elsewhere = network()
            with forked_programs.real_starts():
                assert network() == elsewhere
        assert network() == at_home != elsewhere


@pytest.mark.parametrize("host", ["of the first test", "of the second"])
def test_what_is_set_for_libraries_ends_with_the_test(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "network_devices", lambda hosts: list(hosts))
    environment.set_defaults([host])
    store_environment.set_defaults()
    assert os.environ["UCX_NET_DEVICES"] == host
    assert {"MC_LOG_LEVEL": "ERROR"}.items() <= os.environ.items()

"""The `tandem` command as a person uses it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.demo_talk import check_talk
from tests.processes import descendants, is_alive

TANDEM = [sys.executable, "-m", "cli"]


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `tandem ...`; the test's end kills what still runs, all that it started with it."""
    processes: list[subprocess.Popen[str]] = []

    def start(*args: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*TANDEM, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        with process:
            process.kill()


def wait_gone(pids: set[int], timeout_s: float = 30.0) -> set[int]:
    """Returns those that live on after that time."""
    deadline = time.monotonic() + timeout_s
    while (left := {pid for pid in pids if is_alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.mark.e2e
def test_demo_talks_and_leaves_nothing() -> None:
    """Its processes are forks; `tests/cli/test_plain_installation.py` starts them by Python."""
    result = subprocess.run([*TANDEM, "demo"], capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    check_talk(result.stdout)


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Returns what it prints, up to the line with `words`."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if words in line:
            return seen
    raise AssertionError(f"it ended without {words!r}: {seen}")


def wait_descendants(process: subprocess.Popen[str], count: int) -> set[int]:
    """Returns them as soon as there are so many; some may have ended a moment later."""
    deadline = time.monotonic() + 60
    while len(found := descendants(process.pid)) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def check_end(process: subprocess.Popen[str], started: set[int], exit_code: int) -> None:
    assert process.stdout is not None
    rest = process.stdout.read()
    process.wait(60)
    assert process.returncode == exit_code, rest
    assert not wait_gone(started)
    assert "Traceback" not in rest


@pytest.mark.e2e
def test_up_can_be_stopped_while_it_loads(start: Start) -> None:
    process = start("up", "--port", "0", "--prefill", "2")
    started = wait_descendants(process, 7)
    assert len(started) >= 7
    process.send_signal(signal.SIGTERM)
    check_end(process, started, 0)


@pytest.mark.e2e
def test_up_that_is_killed_takes_everything_with_it(start: Start) -> None:
    process = start("up", "--port", "0")
    read_until(process, "serving at")
    started = descendants(process.pid)
    assert len(started) >= 9
    process.kill()
    check_end(process, started, -signal.SIGKILL)


@pytest.mark.e2e
def test_a_second_interrupt_does_not_wait_for_open_answers(start: Start) -> None:
    process = start("up", "--port", "0", "--prefill", "0", "--decode", "2")
    port = re.search(r"serving at http://127.0.0.1:(\d+)/v1", read_until(process, "serving at"))
    assert port is not None
    started = descendants(process.pid)
    connection = http.client.HTTPConnection("127.0.0.1", int(port[1]), timeout=60)
    wish = {"prompt": "x", "max_tokens": 2000, "n": 16, "stream": True, "ignore_eos": True}
    as_json = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(wish), as_json)
    assert connection.getresponse().readline().startswith(b"data: ")
    process.send_signal(signal.SIGINT)
    read_until(process, "stopping")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    check_end(process, started, 0)
    connection.close()


@pytest.mark.e2e
def test_an_interrupted_demo_leaves_nothing(start: Start) -> None:
    process = start("demo")
    read_until(process, "user:")
    started = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    check_end(process, started, 130)


@pytest.mark.e2e
def test_a_model_that_is_not_there_is_an_error_with_its_path(tmp_path: Path) -> None:
    missing = tmp_path / "nothing-here"
    result = subprocess.run(
        [*TANDEM, "up", str(missing), "--port", "0"], capture_output=True, text=True, timeout=110
    )
    assert result.returncode == 1
    assert str(missing) in result.stderr


def test_unknown_commands_say_which_there_are() -> None:
    result = subprocess.run([*TANDEM, "fly"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "no command 'fly'" in result.stderr and "prefill" in result.stderr

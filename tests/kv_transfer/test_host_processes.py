"""Children, their ends, and sleeping on shared memory."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from host import child_process
from host.child_process import ChildProcess, describe_exit, ipc_address, stop_all
from host.futex import FutexWord
from host.memory_file import MemoryFile
from host.sockets.local_socket import bind_socket, connect_socket
from tests.kv_transfer.host_child import MODULE, ChildConfig

TIMEOUT_S = 60
ROOT = Path(__file__).resolve().parents[2]
ENV = {"PYTHONPATH": str(ROOT)}


@contextmanager
def running_child(action: str, **config: int) -> Iterator[ChildProcess]:
    child = ChildProcess.start(MODULE, ChildConfig(action, **config), "the child", ENV)
    try:
        yield child
    finally:
        child.stop(0)
        child.stop(0)
        assert child.sentinel == -1


def is_readable(descriptor: int, timeout_s: float = TIMEOUT_S) -> bool:
    return bool(select.select([descriptor], [], [], timeout_s)[0])


def test_sentinel_and_exit_code() -> None:
    with running_child("exit") as child:
        assert is_readable(child.sentinel)
        assert child.wait(TIMEOUT_S)
        assert child.exit_code == 7
        assert child.describe_exit() == "the child ended with exit code 7"


def test_killed_child_is_described() -> None:
    with running_child("sleep") as child:
        assert not is_readable(child.sentinel, 0)
        assert not child.wait(0)
        os.kill(child.pid, signal.SIGKILL)
        assert is_readable(child.sentinel)
        assert child.describe_exit() == "the child was killed by SIGKILL"


def test_a_child_that_was_killed_for_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = [4]
    monkeypatch.setattr(child_process, "num_killed_for_memory", lambda: killed[0])
    for num_killed, said in ((1, "1 process here"), (2, "2 processes here")):
        with running_child("sleep") as child:
            killed[0] += num_killed
            os.kill(child.pid, signal.SIGKILL)
            text = child.describe_exit()
        assert text.startswith("the child was killed by SIGKILL: out of memory") and said in text
    with running_child("sleep") as child:
        killed[0] += 1
        os.kill(child.pid, signal.SIGABRT)
        assert child.describe_exit() == "the child was killed by SIGABRT"


def test_signals_without_a_name_have_their_number() -> None:
    assert describe_exit("worker 0", -signal.SIGRTMIN - 1).endswith(f"signal {signal.SIGRTMIN + 1}")


def test_stop_is_gentle_first_and_firm_then() -> None:
    children = [
        ChildProcess.start(MODULE, ChildConfig(action), action, ENV)
        for action in ("gentle", "gentle", "stubborn")
    ]
    _wait_for_signal_handlers(children)
    stop_all(children[:2], timeout_s=TIMEOUT_S)
    stop_all(children[2:], timeout_s=0.2)
    assert [child.exit_code for child in children] == [3, 3, -signal.SIGKILL]


def _wait_for_signal_handlers(children: list[ChildProcess]) -> None:
    """The kernel lists which signals a process catches or ignores."""
    bit = 1 << (signal.SIGTERM - 1)
    deadline = time.monotonic() + TIMEOUT_S
    for child in children:
        while True:
            status = Path(f"/proc/{child.pid}/status").read_text()
            masks = {
                line.split(":")[0]: line.split()[1]
                for line in status.splitlines()
                if ":" in line and line.startswith("Sig")
            }
            if (int(masks["SigCgt"], 16) | int(masks["SigIgn"], 16)) & bit:
                break
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_child_ends_with_its_parent_and_ignores_interrupts() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", MODULE], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(b"%d\n" % os.getpid() + msgspec.json.encode(ChildConfig("nest")))
    parent.stdin.close()
    grandchild = int(parent.stdout.readline())
    assert int(parent.stdout.readline()) == grandchild, "it says so when it is ready"
    os.kill(grandchild, signal.SIGINT)
    sentinel = os.pidfd_open(grandchild)
    assert not is_readable(sentinel, 0.2)
    parent.kill()
    assert is_readable(sentinel)
    os.close(sentinel)
    parent.wait()
    parent.stdout.close()


def test_child_whose_parent_has_ended_already_does_not_start() -> None:
    """Its configuration names another parent than the one it has."""
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE], cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    _, error = process.communicate(
        b"1\n" + msgspec.json.encode(ChildConfig("sleep")), timeout=TIMEOUT_S
    )
    assert process.returncode == 1
    assert b"the parent process has ended" in error


def test_futex_wakes_another_process_and_loses_no_wake_up() -> None:
    rounds = 2000
    memory = MemoryFile.create("test", 128)
    question, answer = FutexWord(memory.buffer, 0), FutexWord(memory.buffer, 64)
    with running_child("count", pid=memory.pid, fd=memory.fd, rounds=rounds) as child:
        for number in range(1, rounds + 1):
            question.value = number
            question.wake()
            while (seen := answer.value) < number:
                answer.wait(seen, 60.0)
        assert child.wait(TIMEOUT_S)
        assert child.exit_code == 0
    del question, answer
    memory.close()


def test_futex_wait_ends_at_a_change_and_at_its_limit() -> None:
    memory = MemoryFile.create("test", 64)
    word = FutexWord(memory.buffer, 0)
    word.value = (1 << 32) + 5
    assert word.value == 5
    started = time.monotonic()
    word.wait(4, 60.0)
    assert time.monotonic() - started < 30, "the word is not 4, so there is nothing to wait for"
    word.wait(5, 0.05)
    assert time.monotonic() - started >= 0.05
    del word
    memory.close()


def test_local_socket_refuses_other_users() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can act as another user")
    address = ipc_address(f"test-{os.getpid()}", "socket")
    context = zmq.Context()
    receiver = bind_socket(context, zmq.PULL, address)
    code = (
        "import os, sys, zmq; os.setuid(int(sys.argv[2])); s = zmq.Context().socket(zmq.PUSH); "
        "s.connect(sys.argv[1]); s.send(b'from ' + sys.argv[2].encode(), zmq.NOBLOCK); "
        "s.close(linger=int(sys.argv[3])); s.context.term()"
    )
    # Whoever is refused never gets rid of it; the other one waits until it is taken.
    for uid, linger_ms in (("54321", 500), ("0", TIMEOUT_S * 1000)):
        command = [sys.executable, "-c", code, address, uid, str(linger_ms)]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
    assert receiver.poll(TIMEOUT_S * 1000)
    assert receiver.recv() == b"from 0"
    assert not receiver.poll(100)
    context.destroy(linger=0)


def test_local_socket_keeps_messages_until_the_other_side_binds() -> None:
    address = ipc_address(f"test-{os.getpid()}", "early")
    context = zmq.Context()
    sender = connect_socket(context, zmq.PUSH, address)
    for number in range(5000):
        sender.send(b"%d" % number, zmq.NOBLOCK)
    receiver = bind_socket(context, zmq.PULL, address)
    for number in range(5000):
        assert receiver.poll(TIMEOUT_S * 1000)
        assert receiver.recv() == b"%d" % number
    context.destroy(linger=0)

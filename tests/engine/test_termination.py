"""Commands end with the process that started them, which runs nothing of its own between fork and
exec."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys

from cli.local_cluster.supervisor import Listener, ServiceSpec, Supervisor
from host.termination import bound

READY = """print('{"event": "ready"}', flush=True); import signal; signal.pause()"""
PARENT = """
import subprocess, sys
from host.termination import bound
child = subprocess.Popen(bound([sys.executable, "-S", "-c", "import signal; signal.pause()"]))
print(child.pid, flush=True)
sys.stdin.read()
"""

forks: list[int] = []


def test_a_command_is_what_was_asked_for_and_ends_with_us() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        assert not select.select([child], [], [], 0)[0]
        parent.stdin.close()
    assert select.select([child], [], [], 30)[0], "the child outlived its parent"
    os.close(child)


def test_streams_and_the_exit_code_are_the_commands() -> None:
    done = subprocess.run(
        bound(["sh", "-c", "cat; echo $FRUIT >&2; exit 3"]),
        input=b"plum", env={"FRUIT": "fig"}, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == (b"plum", b"fig\n", 3)


def test_nothing_is_started_for_a_parent_that_has_ended() -> None:
    command = bound(["echo", "started"])
    command[command.index(str(os.getpid()))] = "1"
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 1 and not done.stdout and b"parent process has ended" in done.stderr


async def test_no_handler_of_forks_runs_where_services_start() -> None:
    """A process with threads of gRPC starts some of them again there, and may crash."""
    os.register_at_fork(before=lambda: forks.append(os.getpid()))
    supervisor = Supervisor([ServiceSpec("a", (sys.executable, "-c", READY), "")], Listener())
    await supervisor.start()
    await supervisor.stop()
    assert not forks
    await (await asyncio.create_subprocess_exec("true", preexec_fn=str)).wait()
    assert forks

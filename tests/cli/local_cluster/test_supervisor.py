"""The supervisor against real processes that die at every moment of their life."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from cli.local_cluster import supervisor as supervisor_module
from cli.local_cluster.supervisor import (
    Listener,
    Service,
    ServiceFailed,
    ServiceSpec,
    ServiceState,
    Supervisor,
)
from tests.awaited import until

READY = 'import json; print(json.dumps({"event": "ready", "port": 7}), flush=True)'
WAIT = "import signal; signal.sigwait([signal.SIGTERM])"


def spec(name: str, *lines: str) -> ServiceSpec:
    return ServiceSpec(name, (sys.executable, "-c", "\n".join(lines)), "nowhere")


class Recorder:
    """Remembers what the supervisor tells."""

    def __init__(self) -> None:
        self.states: list[tuple[str, ServiceState]] = []
        self.progress: list[tuple[str, float]] = []
        self.logs: list[str] = []

    def listener(self) -> Listener:
        return Listener(self._on_state, self._on_progress, lambda _, line: self.logs.append(line))

    def _on_state(self, service: Service) -> None:
        self.states.append((service.spec.name, service.state))

    def _on_progress(self, service: Service, stage: str, fraction: float) -> None:
        self.progress.append((stage, fraction))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_services_become_ready_report_progress_and_stop() -> None:
    recorder = Recorder()
    lines = [
        '{"event": "progress", "stage": "weights", "fraction": 0.5}',
        '{"event": "progress", "stage": "weights", "fraction": 0.75, "total_bytes": 6442450944}',
    ]
    progress = "\n".join(f"print({line!r}, flush=True)" for line in lines)
    supervisor = Supervisor(
        [spec("a", progress, READY, WAIT), spec("b", READY, WAIT)], recorder.listener()
    )
    await supervisor.start()
    pids = [service.pid for service in supervisor.services]
    assert supervisor.services[0].ready_info["port"] == 7
    assert recorder.progress == [("weights", 0.5), ("weights, 4.5 of 6.0 GiB", 0.75)]
    await supervisor.stop()
    assert [s.state for s in supervisor.services] == [ServiceState.STOPPED] * 2
    assert not any(is_alive(pid) for pid in pids if pid)


async def test_one_that_cannot_start_fails_the_cluster_with_its_last_words() -> None:
    supervisor = Supervisor(
        [spec("good", READY, WAIT), spec("bad", "raise SystemExit('no such model: /x')")],
        Listener(),
    )
    with pytest.raises(ServiceFailed, match="bad could not start(.|\n)*no such model: /x"):
        await supervisor.start()
    await supervisor.stop()
    pid = supervisor.services[0].pid
    assert pid is not None and not is_alive(pid)


async def test_one_that_is_killed_is_reported_and_started_again() -> None:
    recorder = Recorder()
    supervisor = Supervisor([spec("node", READY, WAIT)], recorder.listener())
    await supervisor.start()
    service = supervisor.services[0]
    first_pid = service.pid
    assert first_pid is not None
    os.kill(first_pid, signal.SIGKILL)
    await until(lambda: recorder.states.count(("node", ServiceState.READY)) == 2)
    assert service.restarts == 1 and service.pid != first_pid
    assert any("killed by SIGKILL" in line for line in recorder.logs)
    assert ("node", ServiceState.RESTARTING) in recorder.states
    await supervisor.stop()


async def test_stop_during_a_pause_before_a_restart_ends_at_once() -> None:
    recorder = Recorder()
    supervisor = Supervisor([spec("node", READY, "raise SystemExit(3)")], recorder.listener())
    await supervisor.start()
    await until(lambda: supervisor.services[0].restarts >= 1)
    await asyncio.wait_for(supervisor.stop(), 60)
    assert supervisor.services[0].state is ServiceState.STOPPED


@pytest.mark.parametrize("num_steps", range(1, 7))
async def test_stop_while_processes_are_being_made_misses_none(num_steps: int) -> None:
    """`num_steps` of the event loop after the start, where a process is made in several."""
    supervisor = Supervisor([spec(name, READY, WAIT) for name in "abc"], Listener())
    starting = asyncio.create_task(supervisor.start())
    for _ in range(num_steps):
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait_for(supervisor.stop(), 60)
    assert [s.state for s in supervisor.services] == [ServiceState.STOPPED] * 3
    assert not any(is_alive(s.pid) for s in supervisor.services if s.pid)
    with pytest.raises(asyncio.CancelledError):
        await starting


async def test_stages_stop_one_after_the_other() -> None:
    recorder = Recorder()
    specs = [replace(spec(name, READY, WAIT), stop_stage=i) for i, name in enumerate("abc")]
    supervisor = Supervisor(specs[::-1], recorder.listener())
    await supervisor.start()
    await supervisor.stop()
    stopped = [name for name, state in recorder.states if state is ServiceState.STOPPED]
    assert stopped == ["a", "b", "c"]


@pytest.mark.parametrize("drain_s", [0.0, 600.0])
async def test_a_service_has_the_time_that_it_gives_its_open_answers(
    monkeypatch: pytest.MonkeyPatch, drain_s: float
) -> None:
    monkeypatch.setattr(supervisor_module, "_STOP_TIMEOUT_S", 0.1)
    ready = READY.replace('"port": 7', f'"drain_s": {drain_s}')
    recorder = Recorder()
    holds = "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])"
    says = "time.sleep(1); print('the last answer has ended', flush=True)"
    supervisor = Supervisor([spec("slow", holds, ready, WAIT, says)], recorder.listener())
    await supervisor.start()
    await supervisor.stop()
    assert recorder.logs == (["the last answer has ended"] if drain_s else [])


async def test_kill_ends_a_stop_that_nobody_wants_to_wait_for() -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    supervisor = Supervisor([spec("deaf", deaf, READY, "time.sleep(600)")], Listener())
    await supervisor.start()
    stopping = asyncio.create_task(supervisor.stop())
    assert not (await asyncio.wait({stopping}, timeout=0.3))[0]
    supervisor.kill()
    await asyncio.wait_for(stopping, 60)
    assert supervisor.services[0].state is ServiceState.STOPPED


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import asyncio, sys
        from cli.local_cluster.supervisor import Listener, ServiceSpec, Supervisor
        child = ServiceSpec("c", (sys.executable, "-c", {READY!r} + "; " + {WAIT!r}), "")
        async def main():
            supervisor = Supervisor([child], Listener())
            await supervisor.start()
            print(supervisor.services[0].pid, flush=True)
            await asyncio.Event().wait()
        asyncio.run(main())
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    child = os.pidfd_open(child_pid)
    parent.kill()
    parent.wait()
    import select

    assert select.select([child], [], [], 30)[0], "the child outlived its supervisor"
    os.close(child)


async def test_only_the_service_at_fault_is_reported_as_failed() -> None:
    """The others may end as well, before anybody tells them to."""
    recorder = Recorder()
    specs = [spec(f"node-{i}", "import sys; sys.exit('no such checkpoint')") for i in range(4)]
    supervisor = Supervisor(specs, recorder.listener())
    with pytest.raises(ServiceFailed) as failure:
        await supervisor.start()
    await supervisor.stop()
    failed = [name for name, state in recorder.states if state is ServiceState.FAILED]
    assert len(failed) == 1 and failed[0] in str(failure.value)
    ended = {name for name, state in recorder.states if state is ServiceState.STOPPED}
    assert ended == {service.spec.name for service in supervisor.services} - set(failed)


async def test_a_service_has_its_own_variables() -> None:
    recorder = Recorder()
    code = 'import os; print("secret is " + os.environ["TANDEM_SECRET"], flush=True)'
    with_env = replace(spec("one", code, READY, WAIT), env={"TANDEM_SECRET": "s"})
    supervisor = Supervisor([with_env], recorder.listener())
    await supervisor.start()
    await supervisor.stop()
    assert "secret is s" in recorder.logs

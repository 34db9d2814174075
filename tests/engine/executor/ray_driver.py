"""A driver with an executor over two hosts whose steps must not take long, for a test.

1. starts; stops the workers on both hosts, and hands out a step
2. prints why `collect` raised, as JSON
3. waits for a line on standard input (the test has killed something), and does 2 again
4. shuts down
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace

import zmq

from engine.errors import EngineDeadError
from engine.executor.ray_executor import RayExecutor
from engine.sched.output import SchedulerOutput
from tests.engine.core.tiny_engine import tiny_config

STEP_TIMEOUT_S = 0.5
LIMIT_S = 60


def reason_of_death(executor: RayExecutor) -> str:
    """Looks as often as the engine core would."""
    poller = zmq.Poller()
    for source in executor.poll_sources:
        poller.register(source, zmq.POLLIN)
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        left = (executor.deadline or end) - time.monotonic()
        poller.poll(max(0, int(left * 1000)) + 1)
        try:
            executor.collect()
        except EngineDeadError as error:
            return str(error)
    return "still alive"


def main(address: str) -> None:
    config = tiny_config(2)
    parallel = replace(
        config.parallel, distributed_executor_backend="ray", ray_address=address, ray_timeout_s=60
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    executor = RayExecutor(
        replace(config, parallel=parallel), context, step_timeout_s=STEP_TIMEOUT_S
    )
    try:
        executor.initialize(lambda stage, fraction, total=0: None)
        for pid in executor.worker_pids:
            os.kill(pid, signal.SIGSTOP)
        executor.execute_model(SchedulerOutput(1))
        print(json.dumps(reason_of_death(executor)), flush=True)
        sys.stdin.readline()
        executor._step_timeout_s = LIMIT_S
        print(json.dumps(reason_of_death(executor)), flush=True)
    finally:
        pids = executor.worker_pids
        executor.shutdown()
        executor.shutdown()
        context.destroy()
    print(json.dumps(pids), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

"""A driver of two data-parallel groups, each on a host of its own, for a test.

1. starts; hands prompts over to a decode engine beside it, and prints which groups computed any
2. stops the workers on both hosts, and hands out a step, which must not take long; their hosts
   may take their time to say that they are stopped
3. prints why `collect` raised, as JSON
4. waits for a line on standard input (the test has killed something), and does 3 again
5. shuts down
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import zmq

from edge.security.config import SecurityConfig
from engine.config import EngineConfig, ParallelConfig
from engine.contracts.errors import EngineDeadError
from engine.contracts.group_step import GroupStep
from engine.core.core import EngineCore
from engine.executor.ray import ray_host
from engine.executor.ray.ray_executor import RayExecutor
from kv_transfer.config import KVRole, KVTransferConfig
from tests.engine.core.tiny_engine import make_request, tiny_config
from tests.engine.kv_groups.grouped_node import GroupedNode, hand_over, run_until

STEP_TIMEOUT_S = 0.5
LIMIT_S = 60
NUM_TOKENS = 24


class Alone:
    """Is what the decode engine makes of prompts by itself."""

    def __init__(self, node: GroupedNode, prompts: list[list[int]]) -> None:
        self._found: dict[tuple[int, ...], list[int]] = {}
        for index, prompt in enumerate(prompts):
            node.add(f"alone {index}", prompt, NUM_TOKENS)
        run_until([node], lambda: len(node.ended) == len(prompts))
        for index, prompt in enumerate(prompts):
            self._found[tuple(prompt)] = node.tokens[f"alone {index}"]

    def tokens(self, prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
        return self._found[tuple(prompt)][:count]


def config_of(kv_role: KVRole, host: str, parallel: ParallelConfig) -> EngineConfig:
    trusting = SecurityConfig(allow_plaintext=True)
    transfer = KVTransferConfig(kv_role=kv_role, num_streams=2, hosts=(host,), security=trusting)
    config = tiny_config(async_scheduling=True)
    name = f"groups-{secrets.token_hex(4)}"
    return replace(config, engine_id=name, parallel=parallel, kv_transfer=transfer)


def groups_that_compute(prefill: GroupedNode, host: str) -> list[int]:
    """Returns the groups of `prefill` whose KV another engine has gone on with."""
    decode = GroupedNode.start(config_of("kv_consumer", host, ParallelConfig()))
    try:
        prompts = [list(make_request("", seed).spec.prompt_token_ids) for seed in (3, 5, 6, 7, 15)]
        known = Alone(decode, prompts)
        hand_over(prefill, decode, {str(i): prompt for i, prompt in enumerate(prompts)}, known)
    finally:
        decode.shutdown()
    return sorted(set(prefill.groups.values()))


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
    host = address.rpartition(":")[0]
    groups = ParallelConfig(
        data_parallel_size=2,
        distributed_executor_backend="ray",
        ray_address=address,
        ray_timeout_s=60,
    )
    config = config_of("kv_producer", host, groups)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    executor = RayExecutor(config, context, step_timeout_s=LIMIT_S)
    try:
        core = EngineCore(config, executor, lambda *_: None)
        try:
            prefill = GroupedNode(config, core, executor, None)
            print(json.dumps(groups_that_compute(prefill, host)), flush=True)
        finally:
            core.shutdown()
        for pid in executor.worker_pids:
            os.kill(pid, signal.SIGSTOP)
        executor._step_timeout_s = STEP_TIMEOUT_S
        ray_host._STATE_TIMEOUT_S = LIMIT_S
        executor.execute_model(GroupStep(1, [None, None], 0, 0, 0, 1))
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

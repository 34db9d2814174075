"""Imitates an engine core, so that everything around engines can be measured without any: a row
gets a token at the end of each step, and a step always takes equally long.

    python -m edge.program bench.serving.clusters.imitated_core decode_node FLAGS  a node, else real
    python -m edge.program bench.serving.clusters.imitated_core                    its engine core

Steps follow each other at fixed times, whatever holds this process up; what it says of their ends
(`/steps`) are those times, so that a token's delay is counted from when an engine would have had
it. A request joins with the first step that begins after it, and after its first token. Prompts
are computed one after the other; KV is there with the first token. Nothing else is imitated: no
choices, no failures, no caches.

Environment: IMITATED_STEP_S, IMITATED_PROMPT_TOKENS_PER_S.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import zmq

from cli.local_cluster.supervisor import ServiceSpec
from engine.contracts.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    FromEngineCore,
    KVTransferResult,
    PrefillLocally,
    RetryRemotePrefill,
    ShutdownEngine,
    SupplyFirstToken,
    ToEngineCore,
)
from engine.contracts.model_identity import identified
from engine.contracts.outputs import SchedulerStats
from engine.contracts.steps.step_log import StepLog
from engine.core.core_config import CoreProcConfig
from engine.frontend import core_client
from engine.heartbeat_slots import CORE_PLACE
from host.child_process import read_config
from host.life_signs import LifeSigns
from host.sockets.local_socket import Context, connect_socket
from host.sockets.message_reader import MessageReader
from kv_transfer.metadata import KVPeer, TransferStats

STEP_S = "IMITATED_STEP_S"
PROMPT_RATE = "IMITATED_PROMPT_TOKENS_PER_S"
MODULE = "bench.serving.clusters.imitated_core"

_NUM_BLOCKS = 20_000
_STATS_S = 0.1
_IDLE_S = 0.2
_FIRST_ID = 1000
_NUM_IDS = 50_000
_MODEL_HASH = "imitated"
_NODE_ARGS = 3


@dataclass(slots=True)
class _Row:
    """A request that runs, or waits for its first token. `attempt`: of its KV."""

    request: EngineCoreRequest
    num_output: int
    attempt: int = 0


@dataclass(slots=True)
class _Step:
    """Computes tokens of rows, or a prompt. `ends_at`: CLOCK_MONOTONIC seconds."""

    number: int
    ends_at: float
    names: list[str]
    prompt: EngineCoreRequest | None = None
    queue_s: float = 0.0


class Imitation(NamedTuple):
    """Says how fast an imitated engine is."""

    step_s: float
    prompt_tokens_per_s: float

    def of_node(self, spec: ServiceSpec) -> ServiceSpec:
        """Returns a node whose engine core is imitated; a router as it is."""
        argv = list(spec.argv)
        module = argv.index("-m") + 1
        if argv[module] == "router":
            return spec
        argv[module : module + 1] = ["edge.program", MODULE, argv[module]]
        env = {STEP_S: str(self.step_s), PROMPT_RATE: str(self.prompt_tokens_per_s)}
        return replace(spec, argv=tuple(argv), env={**spec.env, **env})


class ImitatedCore:
    """Decides what is computed when. Times are CLOCK_MONOTONIC seconds; nothing here waits."""

    def __init__(
        self, step_s: float, prompt_tokens_per_s: float, log: StepLog | None = None
    ) -> None:
        self._step_s = step_s
        self._prompt_rate = prompt_tokens_per_s
        self._log = log
        self._rows: dict[str, _Row] = {}
        self._waiting: dict[str, _Row] = {}
        """Requests whose first token comes from a peer."""
        self._prompts: deque[EngineCoreRequest] = deque()
        self._step: _Step | None = None
        self._number = 0
        self._num_new = 0
        self._results: list[KVTransferResult] = []

    @property
    def ends_at(self) -> float | None:
        """Returns when the step ends that goes on; None: there is none."""
        return None if self._step is None else self._step.ends_at

    def handle(self, message: ToEngineCore, now: float) -> None:
        """Takes a message of the node server."""
        match message:
            case EngineCoreRequest(kv_transfer_params=params):
                if params is not None and params.do_remote_prefill:
                    self._waiting[message.request_id] = _Row(message, 0, params.attempt)
                else:
                    self._prompts.append(message)
            case SupplyFirstToken(request_id) if request_id in self._waiting:
                row = self._waiting.pop(request_id)
                row.num_output = 1
                self._rows[request_id] = row
                self._num_new += 1
                stats = TransferStats(1 << 20, 1, now, now, now)
                self._results.append(KVTransferResult(request_id, row.attempt, True, stats))
            case RetryRemotePrefill(request_id, params) if request_id in self._waiting:
                self._waiting[request_id].attempt = params.attempt
            case PrefillLocally(request_id) if request_id in self._waiting:
                self._prompts.append(self._waiting.pop(request_id).request)
            case AbortRequests(request_ids):
                for name in request_ids:
                    self._rows.pop(name, None)
                    self._waiting.pop(name, None)
                gone = set(request_ids)
                self._prompts = deque(one for one in self._prompts if one.request_id not in gone)

    def step(self, now: float) -> EngineCoreOutputs:
        """Ends the step that is due, and begins the next one where the last has ended."""
        outputs: list[EngineCoreOutput] = []
        ended_at = now
        if self._step is not None and self._step.ends_at <= now:
            ended_at, step = self._step.ends_at, self._step
            if self._log is not None:
                self._log.retired(step.number, ended_at)
            outputs = self._outputs(step)
            self._step = None
        if self._step is None:
            self._begin(ended_at, now)
        results, self._results = self._results, []
        return EngineCoreOutputs(outputs=outputs, kv_results=results)

    def stats(self, now: float) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._rows),
            num_waiting=len(self._prompts),
            num_waiting_for_remote_kvs=len(self._waiting),
            num_waiting_tokens=sum(len(one.spec.prompt_token_ids) for one in self._prompts),
            num_free_blocks=_NUM_BLOCKS,
            num_total_blocks=_NUM_BLOCKS,
            num_free_rows=1000,
            num_steps=self._number,
            last_step_at=now,
            prefill_tokens_per_s=self._prompt_rate,
        )

    def _begin(self, at: float, now: float) -> None:
        """Begins a step: with a prompt where one waits, else with all rows."""
        prompt = self._prompts.popleft() if self._prompts else None
        if prompt is None and not self._rows:
            return
        num_tokens = len(prompt.spec.prompt_token_ids) if prompt is not None else 0
        seconds = num_tokens / self._prompt_rate if prompt is not None else self._step_s
        names = [] if prompt is not None else list(self._rows)
        queue_s = 0.0 if prompt is None else max(0.0, at - prompt.arrival_time)
        self._step = _Step(self._number, at + seconds, names, prompt, queue_s)
        if self._log is not None:
            num_rows = max(1, len(names))
            new, self._num_new = (1 if prompt is not None else self._num_new), 0
            self._log.issued(self._number, at, num_rows, num_tokens or num_rows, num_tokens, new)
        self._number += 1

    def _outputs(self, step: _Step) -> list[EngineCoreOutput]:
        if step.prompt is not None:
            return [self._first_token(step.prompt, step.queue_s)]
        found = []
        for name in step.names:
            row = self._rows.get(name)
            if row is None:
                continue
            token = _FIRST_ID + (row.num_output * 7919 + step.number) % _NUM_IDS
            row.num_output += 1
            is_last = row.num_output >= row.request.spec.sampling.max_tokens
            if is_last:
                del self._rows[name]
            output = EngineCoreOutput(name, [token], "length" if is_last else "")
            if row.num_output == 2:
                output.num_cached_tokens, output.num_output_tokens_before = 0, 1
            found.append(output)
        return found

    def _first_token(self, request: EngineCoreRequest, queue_s: float) -> EngineCoreOutput:
        """Ends a prompt: one for a peer has its only token, another one runs on."""
        name, params = request.request_id, request.kv_transfer_params
        is_over = request.spec.sampling.max_tokens <= 1
        if params is not None and params.do_remote_decode:
            self._results.append(KVTransferResult(name, params.attempt, True, TransferStats()))
        elif not is_over:
            self._rows[name] = _Row(request, 1)
        reason = "length" if is_over else ""
        return EngineCoreOutput(name, [_FIRST_ID], reason, num_cached_tokens=0, queue_s=queue_s)


class _Process:
    """The loop around an `ImitatedCore`, as a node server expects it."""

    def __init__(self, config: CoreProcConfig) -> None:
        self._config = config.engine
        self._signs = LifeSigns.attach(config.life_signs) if config.life_signs else None
        log = StepLog.attach(config.step_log) if config.step_log else None
        self._core = ImitatedCore(float(os.environ[STEP_S]), float(os.environ[PROMPT_RATE]), log)
        self._socket = connect_socket(Context(), zmq.PAIR, config.client_address)
        self._messages: MessageReader[ToEngineCore] = MessageReader(
            self._socket, ToEngineCore, "the node server"
        )
        self._encoder = msgspec.msgpack.Encoder()

    def run(self) -> None:
        """Returns when asked to stop."""
        self._send(self._ready())
        stats_at = 0.0
        while True:
            if self._signs is not None:
                self._signs.give(CORE_PLACE)
            self._wait()
            while (message := self._messages.next()) is not None:
                if isinstance(message, ShutdownEngine):
                    return
                self._core.handle(message, time.monotonic())
            now = time.monotonic()
            results = self._core.step(now)
            results.timestamp = time.monotonic()
            if now - stats_at >= _STATS_S:
                results.stats, stats_at = self._core.stats(now), now
            if results.outputs or results.kv_results or results.stats is not None:
                self._send(results)

    def _wait(self) -> None:
        """Returns at the end of the step, or when a message is here: a socket's own wait ends at
        whole milliseconds."""
        ends_at = self._core.ends_at
        left_s = _IDLE_S if ends_at is None else min(_IDLE_S, ends_at - time.monotonic())
        if left_s >= 0.001:
            self._socket.poll(int(left_s * 1e3))
        elif left_s > 0 and not self._socket.poll(0):
            time.sleep(left_s)

    def _ready(self) -> EngineReady:
        config = identified(self._config, _MODEL_HASH)
        layout = config.kv_layout
        peer = KVPeer(
            engine_id=config.engine_id,
            epoch=config.epoch,
            layout=layout,
            endpoints=(("127.0.0.1:1",),) * layout.num_ranks,
            is_decode=not config.is_producer,
        )
        return EngineReady(num_blocks=_NUM_BLOCKS, peer=peer, model_hash=_MODEL_HASH)

    def _send(self, message: FromEngineCore) -> None:
        self._socket.send(self._encoder.encode(message))


def main() -> object:
    """Runs a node whose module and flags follow, or is the engine core of one."""
    if len(sys.argv) < _NODE_ARGS:
        _Process(read_config(CoreProcConfig)).run()
        return None
    core_client.CORE_MODULE = MODULE
    _, _, node, *flags = sys.argv
    sys.argv = [node, *flags]
    return importlib.import_module(f"{node}.main").main()

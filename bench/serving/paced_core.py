"""An engine core without a model: a step every few milliseconds, of one token for each request.

`bench.serving.paced_node` is a decode node around it. The first token of a request comes within the
next two steps in a message of its own, at any time, as a prefill node's token comes to a decode
node. From then on it has a token in each step, and it ends with its last one. When the core is
asked to end it writes `PacedRun`, with the moments at which everything was sent.
"""

from __future__ import annotations

import heapq
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from engine.contracts.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    FromEngineCore,
    ResetPrefixCache,
    ShutdownEngine,
    ToEngineCore,
)
from engine.contracts.outputs import SchedulerStats
from engine.core.core_config import CoreProcConfig
from engine.life_places import CORE_PLACE, worker_place
from host.child_process import read_config
from host.life_signs import LifeSigns
from host.sockets.local_socket import connect_socket
from host.sockets.message_reader import MessageReader
from kv_transfer.metadata import KVPeer

PACE = "TANDEM_BENCH_PACE"
"""Variable with a `Pace` as JSON."""
_NUM_BLOCKS = 1 << 20
_STATS_INTERVAL_S = 0.1


class Pace(msgspec.Struct, kw_only=True):
    """Says how often steps end, what tokens they have, in turn, and where the run is written."""

    step_s: float
    token_ids: list[int]
    result_path: str


class PacedRequest(msgspec.Struct):
    """Is one request: when its first token was sent, and which step brought its second."""

    request_id: str
    first_at: float
    first_step: int


class PacedRun(msgspec.Struct):
    """Holds all that was sent. Times are CLOCK_MONOTONIC seconds."""

    steps: list[float]
    rows: list[int]
    requests: list[PacedRequest]


@dataclass(slots=True, order=True)
class _Row:
    due: float
    """When its first token is sent."""
    request_id: str
    left: int
    at: int


class PacedCore:
    """See the module docstring. `run` until it is asked to end."""

    def __init__(self, config: CoreProcConfig, pace: Pace) -> None:
        self._pace = pace
        self._config = config.engine
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = connect_socket(self._context, zmq.PAIR, config.client_address)
        self._messages: MessageReader[ToEngineCore] = MessageReader(
            self._socket, ToEngineCore, "the node server"
        )
        self._signs = LifeSigns.attach(config.life_signs) if config.life_signs else None
        self._encoder = msgspec.msgpack.Encoder()
        self._random = random.Random(0)
        self._coming: list[_Row] = []
        """Rows without a first token, a heap."""
        self._rows: dict[str, _Row] = {}
        self._run = PacedRun([], [], [])
        self._stats_at = 0.0
        self._is_over = False

    def run(self) -> None:
        self._send(EngineReady(num_blocks=_NUM_BLOCKS, peer=self._peer()))
        due = time.monotonic() + self._pace.step_s
        while not self._is_over:
            now = time.monotonic()
            self._give_signs()
            while self._coming and self._coming[0].due <= now:
                self._begin(heapq.heappop(self._coming))
            if due <= now:
                self._step()
                due = max(due + self._pace.step_s, now)
            self._wait(min([due, *(row.due for row in self._coming[:1])]))
        Path(self._pace.result_path).write_bytes(msgspec.json.encode(self._run))
        self._context.destroy(linger=1000)

    def _wait(self, until: float) -> None:
        left_s = until - time.monotonic()
        if 0 < left_s < 0.001:
            time.sleep(left_s)
        if self._socket.poll(max(0, int(left_s * 1000))):
            self._take()

    def _peer(self) -> KVPeer:
        config = self._config
        return KVPeer(engine_id=config.engine_id, epoch=config.epoch, layout=config.kv_layout)

    def _give_signs(self) -> None:
        if self._signs is not None:
            for place in (CORE_PLACE, worker_place(0)):
                self._signs.give(place)

    def _take(self) -> None:
        while (message := self._messages.next()) is not None:
            match message:
                case EngineCoreRequest():
                    self._add(message)
                case AbortRequests(names):
                    for name in names:
                        self._rows.pop(name, None)
                case ShutdownEngine():
                    self._is_over = True
                case ResetPrefixCache():
                    raise NotImplementedError("a bench resets nothing")

    def _add(self, request: EngineCoreRequest) -> None:
        due = time.monotonic() + 2 * self._pace.step_s * self._random.random()
        at = self._random.randrange(len(self._pace.token_ids))
        row = _Row(due, request.request_id, request.spec.sampling.max_tokens, at)
        heapq.heappush(self._coming, row)

    def _begin(self, row: _Row) -> None:
        self._rows[row.request_id] = row
        first = self._output(row)
        first.num_cached_tokens, first.queue_s = 0, 1e-4
        now = time.monotonic()
        self._run.requests.append(PacedRequest(row.request_id, now, len(self._run.steps)))
        self._send(EngineCoreOutputs(outputs=[first], timestamp=now))

    def _step(self) -> None:
        if not self._rows:
            return
        rows = list(self._rows.values())
        outputs = [self._output(row) for row in rows]
        now = time.monotonic()
        self._run.steps.append(now)
        self._run.rows.append(len(rows))
        stats = None
        if now >= self._stats_at + _STATS_INTERVAL_S:
            self._stats_at = now
            stats = SchedulerStats(
                num_running=len(rows), num_free_blocks=_NUM_BLOCKS, num_total_blocks=_NUM_BLOCKS
            )
        self._send(EngineCoreOutputs(outputs=outputs, stats=stats, timestamp=now))

    def _output(self, row: _Row) -> EngineCoreOutput:
        tokens = self._pace.token_ids
        token = tokens[row.at]
        row.at = (row.at + 1) % len(tokens)
        row.left -= 1
        if row.left == 0:
            del self._rows[row.request_id]
        return EngineCoreOutput(row.request_id, [token], "" if row.left else "length")

    def _send(self, message: FromEngineCore) -> None:
        self._socket.send(self._encoder.encode(message))


def main() -> None:
    config = read_config(CoreProcConfig)
    PacedCore(config, msgspec.json.decode(os.environ[PACE], type=Pace)).run()

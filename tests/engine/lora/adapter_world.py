"""Both sides of a node's calls about adapters, with disks, ranks and a clock that a test moves.

The node server's side is `AdapterCalls` on an event loop of its own, the engine's is a real
scheduler with its ledger; messages go between them in a turn of the engine core. Two ranks read
folders when the test lets them, each as the folder is then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from engine.config import EngineConfig, ParallelConfig
from engine.contracts.adapter_commands import DropAdapter, LoadAdapter
from engine.contracts.errors import EngineCallTimeout, EngineDeadError, InvalidRequest
from engine.contracts.messages import AddAdapter, EngineCoreRequest, RemoveAdapter, ToEngineCore
from engine.contracts.request import Request
from engine.contracts.request_spec import AdapterRef
from engine.contracts.scheduler_output import SchedulerOutput
from engine.core.adapter_session import AdapterSession
from engine.executor.worker_messages import AdapterLoaded
from engine.frontend.calls.adapter_calls import AdapterCalls
from engine.frontend.calls.engine_calls import EngineCalls
from engine.lora import LoRAConfig, LoRAModule
from tests.engine.sched.factories import make_config, make_request
from tests.engine.sched.step_machine import Client, StepMachine

NUM_RANKS, MAX_LORAS, MAX_CPU_LORAS = 2, 2, 2
NUM_BLOCKS = 3
"""Room for one request at a time: others wait, some with a slot already."""
ANSWERS = (InvalidRequest, KeyError, EngineCallTimeout, EngineDeadError)
"""Lists what may become of a call, beside what was asked for."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Disk:
    """Folders `weights/copy`; the first part is the digest of what lies there."""

    def __init__(self) -> None:
        self.broken: set[str] = set()

    def fault(self, path: str) -> str:
        return f"{path} cannot be read" if path in self.broken else ""


class Calls(AdapterCalls):
    """Reads the test's folders in place of real ones."""

    def __init__(self, config: EngineConfig, calls: EngineCalls, disk: Disk) -> None:
        super().__init__(config, calls)
        self._disk = disk

    async def _read(self, name: str, path: str, digest: str, *, in_place: bool) -> tuple[Path, str]:
        await asyncio.sleep(0)
        if name in self.known and not in_place:
            raise InvalidRequest(f"{name} is taken", "lora_name")
        if fault := self._disk.fault(path):
            raise InvalidRequest(fault, "lora_path")
        return Path(path), path.split("/")[0]


class Rank:
    """Holds what one worker has: in host memory, in slots, and still to read."""

    def __init__(self) -> None:
        self.memory: set[str] = set()
        self.slots = [""] * MAX_LORAS
        self.reads: deque[LoadAdapter] = deque()

    def execute(self, step: SchedulerOutput) -> None:
        for new in step.new_reqs:
            if new.lora is not None and self.slots[new.lora.index] != new.lora.digest:
                assert new.lora.digest in self.memory, "a row's adapter is not in memory"
                self.slots[new.lora.index] = new.lora.digest


class Ranks:
    """Stands for the executor."""

    def __init__(self, disk: Disk) -> None:
        self.ranks = [Rank() for _ in range(NUM_RANKS)]
        self._disk = disk
        self._replies: list[AdapterLoaded] = []

    def adapter(self, command: LoadAdapter | DropAdapter) -> None:
        for rank in self.ranks:
            if isinstance(command, LoadAdapter):
                rank.reads.append(command)
            else:
                assert command.digest not in [one.digest for one in rank.reads]
                rank.memory.discard(command.digest)

    def take_adapter_replies(self) -> list[AdapterLoaded]:
        replies, self._replies = self._replies, []
        return replies

    def read(self, index: int) -> None:
        """Lets a rank read what it was asked for first, if there is anything."""
        rank = self.ranks[index]
        if rank.reads:
            command = rank.reads.popleft()
            error = self._disk.fault(command.path)
            if not error:
                rank.memory.add(command.digest)
                assert len(rank.memory) <= MAX_CPU_LORAS + 1
            self._replies.append(AdapterLoaded(index, command.digest, error))


class World:
    """One node. `START`: the name that it serves from the start."""

    START = "start"

    def __init__(self) -> None:
        self.clock, self.disk = Clock(), Disk()
        module = LoRAModule(name=self.START, path="a0/a", digest="a0")
        lora = LoRAConfig(
            max_loras=MAX_LORAS, max_cpu_loras=MAX_CPU_LORAS, modules=(module,), folder="/"
        )
        self.config = replace(
            make_config(max_num_seqs=3),
            lora=lora,
            parallel=ParallelConfig(tensor_parallel_size=NUM_RANKS),
        )
        self.loop = asyncio.SelectorEventLoop()
        self.loop.time = self.clock  # type: ignore[method-assign]
        self._sent: deque[ToEngineCore] = deque()
        self.calls = EngineCalls(self._sent.append)
        self.names = Calls(self.config, self.calls, self.disk)
        self.ranks = Ranks(self.disk)
        for rank in self.ranks.ranks:
            rank.memory.add("a0")
        self.machine = StepMachine(self.config, NUM_BLOCKS, depth=1)
        self.session = self._session()
        self.tasks: list[asyncio.Task[Any]] = []
        self.outcomes: list[BaseException | None] = []
        self.is_dead = False
        self._num_requests = 0

    def _session(self) -> AdapterSession:
        session = AdapterSession(self.machine.scheduler, self.ranks)  # type: ignore[arg-type]
        session.ledger._clock = self.clock
        return session

    # The node server --------------------------------------------------------------------------

    def start(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Makes a call; its outcome is checked once it is there."""
        task = self.loop.create_task(call)
        self.tasks.append(task)
        self.settle()
        return task

    def settle(self) -> None:
        """Lets the node server do all that it can."""
        for _ in range(12):
            self.loop.run_until_complete(asyncio.sleep(0))
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.remove(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                assert isinstance(error, ANSWERS), repr(error)

    def ask(self, name: str) -> Client:
        """Sends a request for a name that is served."""
        self._num_requests += 1
        request = make_request(f"r{self._num_requests}", [1, 2, 3], max_tokens=3)
        adapter = AdapterRef(name, self.names.known[name].digest)
        spec = msgspec.structs.replace(request.spec, adapter=adapter)
        message = EngineCoreRequest(request_id=request.request_id, spec=spec, arrival_time=0.0)
        return self.machine.add(Request(message))

    # The engine core --------------------------------------------------------------------------

    def turn_of_calls(self) -> None:
        """Is a turn of the engine core in which no step begins: messages, replies of ranks,
        answers."""
        ledger = self.session.ledger
        while self._sent:
            match self._sent.popleft():
                case AddAdapter(call_id, digest, path):
                    ledger.add(call_id, digest, path)
                case RemoveAdapter(call_id, digest):
                    ledger.remove(call_id, digest)
        self.machine.take(self.session.check())
        for answer in ledger.take_answers():
            self.calls.on_answer(answer)
        self.settle()

    def turn(self) -> None:
        """Is a turn of the engine core with a step."""
        self.turn_of_calls()
        self.machine.make_room()
        step = self.machine.schedule()
        self.session.send()
        if step is not None:
            for rank in self.ranks.ranks:
                rank.execute(step)
        elif self.machine.num_out:
            self.machine.settle()

    def switch_role(self) -> None:
        """Begins anew over the same ranks, without requests."""
        for client in list(self.machine.clients.values()):
            if not client.finish_reason:
                self.machine.abort(client.request.request_id)
        self.machine.settle()
        self.machine = StepMachine(self.config, NUM_BLOCKS, depth=1)
        before, self.session = self.session, self._session()
        self.session.take_over(before)

    def die(self) -> None:
        self.is_dead = True
        self.calls.on_dead("a worker was killed")
        self.settle()

    def finish(self) -> None:
        """Lets all reads and requests end, until nothing moves any more."""
        for _ in range(60):
            for index in range(NUM_RANKS):
                self.ranks.read(index)
            self.turn()

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.settle()
        self.loop.close()

"""Moves activations from stage to stage of a pipeline, and sampled tokens back.

    stage 0 ──[T, H]──▶ stage 1 ──[T, H]──▶ ... ──▶ last stage
       ▲                   ▲                           │
       └───────────────────┴──────── token ids ────────┘

    1. `StageLink(...)` connects the ranks that have the same place in their stages
    2. each step: `receive` what the stage before has made of it, `send` it on
    3. the last stage gives each step's tokens back; the others take them when they come, and wait
       for them only if a step begins that reads one of them
    4. `close`

Where several ranks share the layers of a stage, all of them have the same activations. Each sends
its part alone, and the receivers gather:

    stage s   rank 0 ──[T × H / 2]──▶ rank 0 ─┐ all-gather    stage s + 1
              rank 1 ──[T × H / 2]──▶ rank 1 ─┘ [T, H]

Nothing waits for a receiver: a step's activations are on their way while the next one is computed,
and a thread takes what arrives, so that it is there when its step begins. On a GPU activations go
from device to device through NCCL, on its own stream, and only tokens pass the host. A stage that
dies makes the others' next `receive` or `send` fail.

The link of an engine with one stage does nothing and opens nothing.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import Store

from engine.parallel.distributed import ParallelGroup, connect_gloo, connect_nccl

_NEVER = timedelta(days=3650)
"""The time that an idle stage waits for the next step."""
_CLOSE_TIMEOUT = timedelta(seconds=1)
_END_OF_STREAM = -1
"""Stands where the size of a message does, behind the last one."""


class StageLostError(RuntimeError):
    """Another stage of the pipeline is gone: the engine must be started again."""


class StageLink:
    """Stage `stage` of `num_stages`.

    Args:
        device: Where activations are.
        store: Where the ranks of this pipeline meet, which no other group uses.
        address: Of this rank's host, as the others reach it.
        timeout_s: A rank that others wait for longer than this while they connect counts as dead.
        tp: The ranks of this stage; other stages have as many.
    """

    def __init__(
        self,
        stage: int = 0,
        num_stages: int = 1,
        device: torch.device | str = "cpu",
        store: Store | None = None,
        address: str = "",
        timeout_s: float = 120.0,
        tp: ParallelGroup | None = None,
    ) -> None:
        self.stage = stage
        self.num_stages = num_stages
        self._tp = tp or ParallelGroup(0, 1)
        self._tokens: _Inbox | None = None
        if store is None:
            return
        timeout = timedelta(seconds=timeout_s)
        group = connect_gloo(store, stage, num_stages, address, timeout)
        self._group = group
        self._outbox = _Outbox(num_stages)
        self._activations: _Inbox | _Direct | None = None
        if torch.device(device).type == "cuda":
            nccl = connect_nccl(store, stage, num_stages, timeout)
            self._activations = _Direct(nccl, stage, num_stages)
        elif not self.is_first:
            self._activations = _Inbox(group, stage - 1)
        if not self.is_last:
            self._tokens = _Inbox(group, num_stages - 1)

    @property
    def is_first(self) -> bool:
        """Returns whether this stage embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Returns whether this stage samples."""
        return self.stage == self.num_stages - 1

    def receive(self, num_tokens: int, like: Tensor) -> Tensor:
        """Returns [num_tokens, H] of the next step from the stage before; `like` is [any, H].

        Raises:
            StageLostError: That stage is gone.
            RuntimeError: It computes another step.
        """
        hidden = like.shape[1]
        part = self._receive_part(num_tokens * hidden, like)
        if not num_tokens:
            return like.new_empty(0, hidden)
        return self._tp.gather_rows(part)[: num_tokens * hidden].view(num_tokens, hidden)

    def _receive_part(self, total: int, like: Tensor) -> Tensor:
        """Returns what this rank is sent of a step's `total` numbers, flat."""
        num = self._part_size(total)
        activations = self._activations
        if isinstance(activations, _Direct):
            return activations.receive(like.new_empty(num))
        assert activations is not None
        found = activations.take().view(like.dtype)
        if len(found) != num:
            raise RuntimeError(
                f"stage {self.stage} waits for {num} numbers of a step and got {len(found)} from "
                "the stage before; this is a fault of tandem: please report it with the log"
            )
        return found

    def send(self, x: Tensor) -> Tensor:
        """Sends [T, H] to the next stage, this rank's part of it, and returns it. Nothing may write
        to its memory any more. Raises `RuntimeError` when that stage is gone."""
        num = self._part_size(x.numel())
        part = x.flatten()[num * self._tp.rank : num * (self._tp.rank + 1)]
        if len(part) < num:
            part = F.pad(part, (0, num - len(part)))
        if isinstance(self._activations, _Direct):
            self._activations.send(part)
        else:
            self._post(part, self.stage + 1)
        return x

    def _part_size(self, total: int) -> int:
        """Returns how many numbers each rank of a stage sends of `total`; the last may send noughts
        behind its own."""
        return -(-total // self._tp.size)

    def give_back(self, token_ids: list[int]) -> None:
        """Tells all other stages what a step has sampled, from the last one; -1: nothing."""
        tokens = torch.tensor(token_ids, dtype=torch.int64)
        for stage in range(self.num_stages - 1):
            self._post(tokens, stage)

    def take_tokens(self, *, wait: bool) -> Tensor | None:
        """Returns the tokens of the next step that has sampled, [n] int64 on the host; None: they
        are not here yet, and the caller does not `wait`. Raises `StageLostError`."""
        assert self._tokens is not None
        found = self._tokens.take() if wait else self._tokens.take_now()
        return None if found is None else found.view(torch.int64)

    def _post(self, x: Tensor, stage: int) -> None:
        self._outbox.send(self._group, x, stage)

    def close(self) -> None:
        """Releases sockets. Idempotent."""
        if self.num_stages == 1 or self._group is None:
            return
        listening = [] if self.is_last else [self.stage + 1]
        if self.is_last:
            listening = list(range(self.num_stages - 1))
        elif isinstance(self._activations, _Direct):
            listening = []
        self._outbox.send_end_of_stream(self._group, listening)
        for inbox in (self._activations, self._tokens):
            if isinstance(inbox, _Inbox):
                inbox.join()
        self._group = self._activations = self._tokens = None
        self._outbox.close()


class _Outbox:
    """Sends without waiting, as long as no more than a pipeline's steps are on their way."""

    def __init__(self, num_stages: int) -> None:
        self._most = 2 * (num_stages + 1)
        self._on_their_way: deque[tuple[Any, Any, list[Tensor]]] = deque()
        self._lock = threading.Lock()

    def send(self, group: Any, x: Tensor, to: int) -> None:
        payload = x.contiguous().view(torch.uint8).flatten()
        size = torch.tensor([payload.numel()], dtype=torch.int64)
        with self._lock:
            works = [group.send([part], to, 0) for part in (size, payload) if part.numel()]
            self._on_their_way.append((works[0], works[-1], [size, payload]))
            while len(self._on_their_way) > self._most:
                first, last, _ = self._on_their_way.popleft()
                first.wait()
                last.wait()

    def send_end_of_stream(self, group: Any, stages: list[int]) -> None:
        """Sends stages that still receive the message that nothing follows."""
        size = torch.tensor([_END_OF_STREAM], dtype=torch.int64)
        with suppress(RuntimeError):
            for work in [group.send([size], stage, 0) for stage in stages]:
                work.wait(_CLOSE_TIMEOUT)

    def close(self) -> None:
        self._on_their_way.clear()


class _Inbox:
    """Takes what `source` sends, in a thread, and keeps it in order."""

    def __init__(self, group: Any, source: int) -> None:
        self._arrived: queue.SimpleQueue[Tensor | Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_receive_forever, args=(group, source, self._arrived), daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Waits a moment for the sender's end of stream: an interpreter must not end in the
        thread."""
        self._thread.join(_CLOSE_TIMEOUT.total_seconds())

    def take(self) -> Tensor:
        """Waits for the next message. Raises what ended the connection."""
        return _checked(self._arrived.get(), self._arrived)

    def take_now(self) -> Tensor | None:
        """Returns the next message if it is here."""
        try:
            return _checked(self._arrived.get_nowait(), self._arrived)
        except queue.Empty:
            return None


def _checked(found: Tensor | Exception, arrived: queue.SimpleQueue[Tensor | Exception]) -> Tensor:
    if isinstance(found, Exception):
        arrived.put(found)
        raise StageLostError(f"another stage of the pipeline is gone: {found}") from found
    return found


def _receive_forever(
    group: Any, source: int, arrived: queue.SimpleQueue[Tensor | Exception]
) -> None:
    size = torch.empty(1, dtype=torch.int64)
    try:
        while True:
            group.recv([size], source, 0).wait(_NEVER)
            if int(size) == _END_OF_STREAM:
                arrived.put(StageLostError(f"stage {source} has ended"))
                return
            message = torch.empty(int(size), dtype=torch.uint8)
            if message.numel():
                group.recv([message], source, 0).wait(_NEVER)
            arrived.put(message)
    except RuntimeError as error:
        arrived.put(error)


class _Direct:
    """Moves activations between GPUs. The host waits for nothing: streams wait for each other."""

    def __init__(self, group: Any, stage: int, num_stages: int) -> None:
        self._group = group
        self._stage = stage
        self._most = num_stages + 1
        self._on_their_way: deque[tuple[Any, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        x = x.contiguous()
        self._on_their_way.append((self._group.send([x], self._stage + 1, 0), x))
        while len(self._on_their_way) > self._most:
            work, _ = self._on_their_way.popleft()
            work.wait()

    def receive(self, into: Tensor) -> Tensor:
        self._group.recv([into], self._stage - 1, 0).wait()
        return into

"""A step's result on its way from the device to the host.

1. `AsyncOutput(...)` starts the copies, on a stream of their own; the runner goes on.
2. `get_output()` waits for them: the only place of a step where the host waits. Any thread may
   call it, once.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from engine.batch.input_batch import Int32Array
from engine.outputs import ModelRunnerOutput
from engine.sample.logprobs import LogprobsTensors
from engine.sample.sampler import SamplerOutput


class OutputStream:
    """Where results are copied. On the CPU there is nothing to copy and no stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def waits(self) -> bool:
        """Whether results come later than steps are started."""
        return self._stream is not None

    def start_copy(
        self, sampled: SamplerOutput
    ) -> tuple[torch.Tensor, LogprobsTensors | None, torch.cuda.Event | None]:
        """Token ids and log probabilities on the host, valid once the event has happened.
        `sampled` must live until then: its memory belongs to the stream it was computed on."""
        stream = self._stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            token_ids = sampled.token_ids.to("cpu", non_blocking=True)
            logprobs = sampled.logprobs.to_host() if sampled.logprobs is not None else None
        if stream is None:
            return token_ids, logprobs, None
        # A waiting thread sleeps; spinning would take the interpreter from the runner's.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return token_ids, logprobs, event


class AsyncOutput:
    """Sampled tokens of one step and whose they are. `rows` and `epochs` are [num_sampled];
    the epochs are those of the step, whoever has the rows when the result is read."""

    def __init__(
        self,
        step_id: int,
        rows: Int32Array,
        epochs: list[int],
        sampled: SamplerOutput | None,
        stream: OutputStream,
    ) -> None:
        self._step_id = step_id
        self._rows: list[int] = rows.tolist()
        self._epochs = epochs
        self._sampled = sampled
        self._waits = stream.waits
        self._copy = stream.start_copy(sampled) if sampled is not None else None

    @property
    def is_ready(self) -> bool:
        """Whether there is no device to wait for, now or ever."""
        return not self._waits

    def get_output(self) -> ModelRunnerOutput:
        """Raises `RuntimeError` when the device failed."""
        token_ids: list[int] = []
        logprobs = {}
        if self._copy is not None:
            tokens_on_host, logprobs_on_host, event = self._copy
            if event is not None:
                event.synchronize()
            self._sampled = None
            token_ids = tokens_on_host.tolist()
            if logprobs_on_host is not None:
                logprobs = logprobs_on_host.by_row(self._rows)
        return ModelRunnerOutput(
            step_id=self._step_id,
            rows=self._rows,
            epochs=self._epochs,
            token_ids=token_ids,
            logprobs=logprobs,
        )

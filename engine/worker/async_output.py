"""A step's result on its way from the device to the host.

1. `AsyncOutput(...)` starts the copies, on a stream of their own; the runner goes on.
2. `get_output()` waits for them, or where nothing sampled for the device. Any thread may call it,
   once. With the result a step is over: its blocks may be read, kept elsewhere and written anew by
   others, and the seconds until then are what it took.
3. `wait_for_tokens()` waits, too: the next step does that where grammars need the tokens. In any
   other step the thread that starts steps never waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from engine.batch.places import NO_TOKEN, Int32Array
from engine.contracts.outputs import ModelRunnerOutput, RowFailure, StepDrafts
from engine.sample.logprobs import LogprobsTensors
from engine.sample.prompt_logprobs import PromptLogprobsTensors
from engine.sample.sampler import SamplerOutput
from engine.sample.siblings import SiblingTensors

_LOOK_S = 50e-6
"""The driver's interrupt wakes a thread 0.2 to 0.5 ms late on virtual machines, and a thread that
spins takes a core."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The result of a step, on the device or on the host."""

    token_ids: torch.Tensor | None
    """[num_sampled, W] int64, of each request, then -1; None when nothing sampled."""
    logprobs: LogprobsTensors | None
    prompt_logprobs: list[PromptLogprobsTensors]
    siblings: SiblingTensors | None
    num_drafts: torch.Tensor | None
    """[num_sampled] int32; None when nothing drafts."""
    draft_features: torch.Tensor | None = None
    """[num_sampled, F]; None when nothing needs them."""

    def to_host(self) -> StepTensors:
        """Starts the copies, without waiting."""
        return StepTensors(
            None if self.token_ids is None else self.token_ids.to("cpu", non_blocking=True),
            None if self.logprobs is None else self.logprobs.to_host(),
            [part.to_host() for part in self.prompt_logprobs],
            None if self.siblings is None else self.siblings.to_host(),
            None if self.num_drafts is None else self.num_drafts.to("cpu", non_blocking=True),
            None
            if self.draft_features is None
            else self.draft_features.to("cpu", non_blocking=True),
        )


class ResultCopier:
    """Copies results on a stream of its own. On the CPU there is nothing to copy and no stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def waits(self) -> bool:
        """Returns whether results come later than steps are started."""
        return self._stream is not None

    def start_copy(
        self, found: StepTensors | None
    ) -> tuple[StepTensors | None, torch.cuda.Event | None]:
        """Starts the copy to the host, which is valid once the event has happened. `found` must
        live until then: its memory belongs to the stream it was computed on. Where nothing was
        found, the event tells that the device has done the step.
        """
        stream = self._stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            on_host = None if found is None else found.to_host()
        if stream is None:
            return on_host, None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return on_host, event


class AsyncOutput:
    """Sampled tokens of one step and whose they are. `rows` and `epochs` are [num_sampled];
    the epochs are those of the step, whichever requests have the rows when the result is read."""

    def __init__(
        self,
        step_id: int,
        rows: Int32Array,
        epochs: list[int],
        sampled: SamplerOutput | None,
        prompt_logprobs: list[PromptLogprobsTensors],
        copier: ResultCopier,
    ) -> None:
        self._step_id = step_id
        self._rows: list[int] = rows.tolist()
        self._epochs = epochs
        self._waits = copier.waits
        self._failures = {} if sampled is None else sampled.failures
        self.on_result: Callable[[ModelRunnerOutput], None] | None = None
        """Takes the result before the thread that asks for it."""
        self._found: StepTensors | None = None
        if sampled is not None or prompt_logprobs:
            self._found = StepTensors(
                None if sampled is None else sampled.token_ids,
                None if sampled is None else sampled.logprobs,
                prompt_logprobs,
                None if sampled is None else sampled.siblings,
                None if sampled is None else sampled.num_drafts,
                None if sampled is None else sampled.draft_features,
            )
        self._copy = copier.start_copy(self._found)

    @property
    def is_ready(self) -> bool:
        """Returns whether there is no device to wait for, now or ever."""
        return not self._waits

    def get_output(self) -> ModelRunnerOutput:
        """Raises `RuntimeError` when the device failed."""
        result = self._result()
        if self.on_result is not None:
            self.on_result(result)
        return result

    def _result(self) -> ModelRunnerOutput:
        output = ModelRunnerOutput(self._step_id, self._rows, self._epochs, [])
        on_host = self._wait()
        self._found = None
        if on_host is None:
            return output
        if on_host.token_ids is not None:
            token_ids = self._cut(on_host.token_ids)
            _add_tokens(output, token_ids, on_host.logprobs, is_cut=bool(self._failures))
            output.failures = self._row_failures(on_host.token_ids)
        output.drafts = self._drafts(on_host)
        if on_host.siblings is not None:
            epochs = dict(zip(self._rows, self._epochs, strict=True))
            failed = {failure.row for failure in output.failures}
            drawn = on_host.siblings.by_row(epochs)
            output.siblings = [found for found in drawn if found.row not in failed]
        output.prompt_logprobs = [part.packed() for part in on_host.prompt_logprobs]
        return output

    def _drafts(self, on_host: StepTensors) -> StepDrafts | None:
        counts, features = on_host.num_drafts, on_host.draft_features
        if counts is None and features is None:
            return None
        found = StepDrafts([] if counts is None else counts.tolist())
        if features is not None:
            numbers = features.contiguous().view(torch.uint8).numpy()
            found.features = {
                row: one.tobytes() for row, one in zip(self._rows, numbers, strict=True)
            }
        return found

    def wait_for_tokens(self) -> list[tuple[int, int, list[int]]]:
        """Returns (row, epoch, its tokens) for each request that sampled."""
        on_host = self._wait()
        assert on_host is not None and on_host.token_ids is not None
        token_ids = on_host.token_ids
        return [
            (row, epoch, [token_id for token_id in tokens if token_id != NO_TOKEN])
            for row, epoch, tokens in zip(
                self._rows, self._epochs, self._cut(token_ids).tolist(), strict=True
            )
        ]

    def _wait(self) -> StepTensors | None:
        on_host, event = self._copy
        while event is not None and not event.query():  # type: ignore[no-untyped-call]
            time.sleep(_LOOK_S)
        return on_host

    def _cut(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns [num_sampled, W] without tokens that were chosen where none could be."""
        if not self._failures:
            return token_ids
        kept = token_ids.clone()
        for index, failure in self._failures.items():
            kept[index, failure.place :] = NO_TOKEN
        return kept

    def _row_failures(self, token_ids: torch.Tensor) -> list[RowFailure]:
        """Returns the requests that came as far as the place at which they fail."""
        return [
            RowFailure(self._rows[index], self._epochs[index], failure.reason)
            for index, failure in sorted(self._failures.items())
            if int(token_ids[index, failure.place]) != NO_TOKEN
        ]


def _add_tokens(
    output: ModelRunnerOutput,
    token_ids: torch.Tensor,
    logprobs: LogprobsTensors | None,
    *,
    is_cut: bool,
) -> None:
    """Adds `token_ids`, which is [num_sampled, W]. `is_cut`: some request may have none."""
    cells: list[int] = token_ids.flatten().tolist()
    found = {} if logprobs is None else logprobs.by_cell()
    if token_ids.shape[1] == 1 and not is_cut:
        output.token_ids, output.logprobs = cells, found
        return
    kept = [cell for cell, token_id in enumerate(cells) if token_id != NO_TOKEN]
    output.token_ids = [cells[cell] for cell in kept]
    output.counts = (token_ids != NO_TOKEN).sum(dim=1).tolist()
    output.logprobs = {index: found[cell] for index, cell in enumerate(kept) if cell in found}

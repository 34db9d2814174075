"""Runs steps in one of several pipeline stages.

    stage 0                     stage 1                      last stage
    step k     ── [T, H] ──▶    step k     ── [T, H] ──▶     step k, samples
    step k+1   ── [T, H] ──▶    ...                             │
       ▲                                                        │
       └────────── tokens of step k, once they are known ───────┘

Every stage has the rows of all requests, and gets the same steps. Only the last one samples,
looks log probabilities up and has grammars. Rows of the other stages get their tokens later: a
prompt's next chunk needs none, so chunks follow each other without a pause, but a step in which
rows decode waits for the tokens of all steps before it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from engine.batch.input_batch import BatchOrder
from engine.batch.places import NO_TOKEN, Int32Array
from engine.contracts.outputs import ModelRunnerOutput
from engine.contracts.scheduler_output import NewRequestData, SchedulerOutput
from engine.parallel.stage_link import StageLink
from engine.sample.prompt_logprobs import PromptLogprobsTensors
from engine.sample.sampler import SamplerOutput
from engine.worker.async_output import AsyncOutput
from engine.worker.kv_connector import OnLayer
from engine.worker.model_runner import ModelRunner
from kv_transfer.layout import KVLayout
from tandem_kernels import ops


class StageRunner(ModelRunner):
    """One of several stages. `layout`: of this rank's cache; the rest is what `ModelRunner`
    takes."""

    def __init__(self, link: StageLink, layout: KVLayout, *args: Any) -> None:
        super().__init__(*args)
        self._link = link
        self._groups = layout.groups


class EarlyStageRunner(StageRunner):
    """Any stage but the last one."""

    def __init__(self, link: StageLink, layout: KVLayout, *args: Any) -> None:
        super().__init__(link, layout, *args)
        self._unknown: deque[tuple[Int32Array, list[int]]] = deque()
        """Holds (rows, their epochs) of each step whose tokens have not come."""

    def _run_eagerly(
        self, order: BatchOrder, on_layer: OnLayer
    ) -> tuple[SamplerOutput | None, list[PromptLogprobsTensors]]:
        self._take_tokens(wait=order.num_decodes > 0)
        batch = self._input_buffers.prepare(order, self._row_tables)
        self._forward(batch, on_layer)
        self._advance_rows(batch, None)
        if order.num_sampled:
            rows = order.rows[: order.num_sampled].copy()
            self._unknown.append((rows, self.states.epoch_np[rows].tolist()))
        return None, []

    def _take_tokens(self, *, wait: bool) -> None:
        """Gives rows the tokens that have come, or all that are to come. A row whose owner has
        changed gets none."""
        while self._unknown:
            tokens = self._link.take_tokens(wait=wait)
            if tokens is None:
                return
            rows, epochs = self._unknown.popleft()
            is_same = self.states.is_live_np[rows] & (self.states.epoch_np[rows] == epochs)
            if is_same.any():
                kept = torch.from_numpy(is_same)
                where = torch.from_numpy(rows)[kept].to(self._device)
                # As if each had just computed one token, without which it has been advanced.
                bounds = torch.arange(len(where) + 1, dtype=torch.int32, device=self._device)
                sampled = tokens[kept].unsqueeze(1).to(self._device)
                ops.post_update(where, bounds, sampled, self._row_tables[0])

    def _add_request(self, new: NewRequestData) -> None:
        self.states.add_request(new)
        self._block_tables[0].add_request(new.row, new.block_ids)

    def _remove_request(self, row: int) -> None:
        self.states.remove_request(row)
        self._decode_set.remove_request(row)
        for tables in self._block_tables:
            tables.remove_request(row)


class LastStageRunner(StageRunner):
    """The stage that samples, behind others, which learn of tokens as soon as the host does."""

    def execute_model(self, step: SchedulerOutput) -> AsyncOutput:
        output = super().execute_model(step)
        output.on_result = self._give_back
        return output

    def _give_back(self, result: ModelRunnerOutput) -> None:
        if result.rows:
            tokens = [(found or [NO_TOKEN])[0] for found in result.tokens_by_request()]
            self._link.give_back(tokens)


def create_runner(link: StageLink, layout: KVLayout, *args: Any) -> ModelRunner:
    """Returns the runner of a stage, or of all layers where there is one stage; takes what
    `StageRunner` does."""
    if link.num_stages == 1:
        return ModelRunner(*args)
    kind = LastStageRunner if link.is_last else EarlyStageRunner
    return kind(link, layout, *args)

"""Runs the steps of one rank of several data-parallel groups.

    1. a `GroupStep` comes to all ranks
    2. a rank whose group has work runs its step; what it exchanges is padded to the tokens of the
       group that has most
    3. a rank whose group has none computes the experts of the others' tokens, layer by layer, or
       replays the graph that they replay
    4. if any group has requests that got tokens, and a drafter has weights, all ranks run its
       passes together in the same way, whether they draft for something or not

Groups that only decode all replay graphs of one size, which the largest needs: the collectives in
them are the same. Other steps launch their kernels one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.batch.input_batch import BatchOrder
from engine.config import EngineConfig
from engine.contracts.group_step import GroupStep
from engine.contracts.steps.step_launches import GraphKey
from engine.layers.feed_forward.sparse_mlp import SparseMLP
from engine.models.base import CausalLM
from engine.parallel.place import ParallelPlace
from engine.parallel.token_exchange import GatherScatter
from engine.sample.sampler import SamplerOutput
from engine.worker.async_output import AsyncOutput
from engine.worker.kv_connector import KVConnector
from engine.worker.model_runner import ModelRunner


class GroupRunner(ModelRunner):
    """A `ModelRunner` whose steps are those of its group. `run` in place of `execute_model`, which
    runs steps that are the same in all groups, as at the start. `more`: see there."""

    _num_decodes: int | None = None
    """See `GroupStep`; None: no such step runs."""

    def __init__(
        self,
        place: ParallelPlace,
        config: EngineConfig,
        model: CausalLM,
        connector: KVConnector,
        device: torch.device,
        *more: Any,
    ) -> None:
        super().__init__(config, model, connector, device, *more)
        assert isinstance(place.exchange, GatherScatter)
        self._exchange = place.exchange
        self._number = place.dp.rank
        self._num_sampled: int | None = None
        """See `GroupStep`; None: no such step runs."""
        self._expert_blocks = [block for block in model.modules() if isinstance(block, SparseMLP)]
        if self._network is not None:
            chain = self._network.network.chain
            self._expert_blocks += [block for network in chain for block in network.expert_blocks]

    def run(self, message: GroupStep) -> AsyncOutput:
        """Runs this rank's part of a step; with nothing to compute, the result is empty. Raises
        like `execute_model`."""
        step = message.steps[self._number]
        self._query_len = message.query_len
        is_idle = step is None or self.size_of(step)[1] == 0
        self._begin(message.num_decodes, message.num_tokens, message.num_sampled)
        try:
            output = None if step is None else self.execute_model(step)
            if is_idle and message.num_tokens > 0:
                self._take_part(message.num_decodes, message.query_len)
                self._join_drafter_collectives(message.num_drafts)
        finally:
            self._begin(None, None, None)
        if output is None:
            no_rows = np.zeros(0, np.int32)
            output = AsyncOutput(message.step_id, no_rows, [], None, [], self._result_copier)
        return output

    def _begin(
        self, num_decodes: int | None, num_tokens: int | None, num_sampled: int | None
    ) -> None:
        self._num_decodes, self._num_sampled = num_decodes, num_sampled
        self._exchange.num_rows = num_tokens

    def _graph_key(self, order: BatchOrder) -> GraphKey | None:
        if self._num_decodes is None:
            return super()._graph_key(order)
        samples = self.sampler.only_draws(order.rows)
        return self._graph_of(self._num_decodes, order.decode_query_len, samples)

    def _graph_of(self, num_decodes: int, query_len: int, samples: bool) -> GraphKey | None:
        if self._graphs is None or num_decodes == 0:
            return None
        return self._graphs.launches.of_decodes(num_decodes, query_len, samples)

    @torch.inference_mode()
    def _take_part(self, num_decodes: int, query_len: int) -> None:
        key = self._graph_of(num_decodes, query_len, True)
        if key is None:
            for block in self._expert_blocks:
                block.take_part()
            return
        assert self._graphs is not None
        self._input_buffers.load_padding(key)
        self._graphs.replay(key)

    def _draft(
        self, order: BatchOrder, sampled: SamplerOutput | None, num_drafts: int | None
    ) -> SamplerOutput | None:
        if self._network is None or self._num_sampled is None:
            return super()._draft(order, sampled, num_drafts)
        self._exchange.num_rows = self._network.passes.most_rows = self._num_sampled
        try:
            drafted = super()._draft(order, sampled, num_drafts)
        finally:
            self._network.passes.most_rows = None
        if sampled is None:
            self._join_drafter_collectives(num_drafts)
        return drafted

    @torch.inference_mode()
    def _join_drafter_collectives(self, num_drafts: int | None) -> None:
        """Takes part in the passes of other groups' drafters."""
        count = self._decode_query_len - 1 if num_drafts is None else num_drafts
        if self._network is None or not self._num_sampled or count == 0:
            return
        self._exchange.num_rows = self._num_sampled
        self._network.passes.take_part(self._num_sampled, count)

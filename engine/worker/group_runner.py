"""Runs the steps of one rank of several data-parallel groups.

    1. a `GroupStep` comes to all ranks
    2. a rank whose group has work runs its step; what it exchanges is padded to the tokens of the
       group that has most
    3. a rank whose group has none computes the experts of the others' tokens, layer by layer, or
       replays the graph that they replay

Groups that only decode all replay graphs of one size, which the largest needs: the collectives in
them are the same. Other steps launch their kernels one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.batch.input_batch import BatchOrder
from engine.config import EngineConfig
from engine.layers.sparse_mlp import SparseMLP
from engine.models.base import CausalLM
from engine.parallel import ParallelPlace
from engine.sched.group_output import GroupStep
from engine.token_exchange import GatherScatter
from engine.worker.async_output import AsyncOutput
from engine.worker.cudagraph_utils import GraphKey
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
        self._expert_blocks = [block for block in model.modules() if isinstance(block, SparseMLP)]

    def run(self, message: GroupStep) -> AsyncOutput:
        """Runs this rank's part of a step; with nothing to compute, the result is empty. Raises
        like `execute_model`."""
        step = message.steps[self._number]
        is_idle = step is None or self.size_of(step)[1] == 0
        self._num_decodes, self._exchange.num_rows = message.num_decodes, message.num_tokens
        try:
            output = None if step is None else self.execute_model(step)
            if is_idle and message.num_tokens > 0:
                self._take_part(message.num_decodes)
        finally:
            self._num_decodes = self._exchange.num_rows = None
        if output is None:
            nobody = np.zeros(0, np.int32)
            output = AsyncOutput(message.step_id, nobody, [], None, [], self._result_copier)
        return output

    def _graph_key(self, order: BatchOrder) -> GraphKey | None:
        if self._num_decodes is None:
            return super()._graph_key(order)
        return self._graph_of(self._num_decodes, self.sampler.only_draws(order.rows))

    def _graph_of(self, num_decodes: int, samples: bool) -> GraphKey | None:
        if self._graphs is None or num_decodes == 0:
            return None
        return self._graphs.dispatch(num_decodes, self._decode_query_len, samples)

    @torch.inference_mode()
    def _take_part(self, num_decodes: int) -> None:
        key = self._graph_of(num_decodes, True)
        if key is None:
            for block in self._expert_blocks:
                block.take_part()
            return
        assert self._graphs is not None
        self._input_buffers.load_padding(key.num_reqs, key.num_tokens, key.decode_query_len)
        self._graphs.replay(key)

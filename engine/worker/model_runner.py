"""Runs steps: rows, batch, model, sampling.

One step, in this order (see also `engine.contracts.scheduler_output`):

    1. rows that ended leave, new requests enter, blocks are appended, the decode set changes, and
       blocks that requests no longer share are copied
    2. staged writes go to the device, once for all of them
    3. the batch is gathered from rows
    4. the model runs; after each layer the connector may hand its KV on
    5. the requests whose known tokens are now all computed sample: one token each, and another one
       for each draft that was right; prompts that want it have their log probabilities looked up
    6. the copy of the result to the host starts, rows advance on the device, and drafts of what
       follows are written, if there is a drafter

On a GPU, 3 to 6 of a step with decodes only are one CUDA graph, but for the copy, and but for the
sampling when a request wants more than a draw from its logits. So they may be of a step with
prompts. One that no graph holds may be run as two: decodes go through 3 to 6, then prompts.

Nothing here waits for the device, but for a step with grammars: behind the launch of its forward
pass, 5 waits for the tokens of the step before (`engine.sample.grammars`). The result is awaited in
`AsyncOutput.get_output`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from engine.batch.block_table import BlockTables
from engine.batch.buffer_utils import Carrier, to_device
from engine.batch.decode_set import DecodeSet
from engine.batch.input_batch import BatchOrder, InputBatch, InputBuffers, order_batch
from engine.batch.places import NO_TOKEN
from engine.batch.row_states import RowError, RowStates
from engine.config import EngineConfig
from engine.contracts.scheduler_output import AdaptiveOutput, NewRequestData, SchedulerOutput
from engine.contracts.steps.step_launches import GraphKey
from engine.layers.vocabulary.vocab_part import VocabPart
from engine.models.base import CausalLM, ForwardInputs, Taps
from engine.models.drafts.base import DraftNetwork
from engine.models.recorded_steps import PROMPT_TOKENS, recorded_steps
from engine.models.vision.tower import VisionTower
from engine.sample.prompt_logprobs import PromptLogprobsStates, PromptLogprobsTensors
from engine.sample.sampler import SamplerOutput
from engine.worker.async_output import AsyncOutput, ResultCopier
from engine.worker.attention_of_model import (
    attention_of,
    group_inputs,
    prepare_attention,
)
from engine.worker.drafts.drafter import Drafts
from engine.worker.drafts.network_drafter import NetworkDrafter, with_drafts
from engine.worker.dummy_steps import DummyStep, largest_of, warm_up_steps
from engine.worker.graphs.cuda_graphs import CudaGraphManager
from engine.worker.graphs.recorded_choices import RecordedChoices
from engine.worker.kv_connector import KVConnector, OnLayer, ignore_layer, waits_for_layers
from engine.worker.memory.kv_cache import KVCache
from engine.worker.rows.adapters import Adapters, NoAdapters
from engine.worker.rows.beam_rows import BeamRows
from engine.worker.rows.image_rows import create_image_rows
from engine.worker.sampled_rows import attends_ends, keeps_sampled_rows
from engine.worker.sampler_of_model import create_sampler
from engine.worker.step_halves import Part, joined, parts_of
from kv_transfer.layout import own_groups
from tandem_kernels import ops
from tandem_kernels.attention.index_pages import LayerCache


class ModelRunner:
    """Owns the rows of one rank. `kv_caches` are set once, before the first step."""

    kv_caches: list[LayerCache]
    """One a layer, as `engine.worker.memory.kv_cache.layer_views` has them."""
    kv_pages: torch.Tensor
    """All of them by block, as `engine.worker.memory.kv_cache.KVCache` has them."""
    _query_len: int
    """Tokens of each decode in the next step: fewer than there may be, if the scheduler says so."""

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        connector: KVConnector,
        device: torch.device,
        draft: DraftNetwork | None = None,
        tower: VisionTower | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        limits, max_model_len = config.scheduler, config.model.max_model_len
        rows = limits.max_num_seqs
        self._config, self._model = config, model
        self._connector, self._device = connector, device
        self._decode_query_len = self._query_len = config.decode_query_len
        self.states = RowStates.of(config, device)
        self._groups = config.kv_layout.groups
        self._block_tables = [
            BlockTables(rows, max_model_len, group.block_size, device, config.decode_query_len - 1)
            for group in own_groups(self._groups)
        ]
        self._decode_set = DecodeSet(rows)
        self._images = create_image_rows(config, tower, device)
        splits = model.vocab_cut is not None
        self.sampler = create_sampler(config, self.states, device, splits_vocabulary=splits)
        self._beams = BeamRows(self.states, self._block_tables, device)
        self.adapters: Adapters = adapters or NoAdapters()
        self._prompt_logprobs = PromptLogprobsStates(rows)
        self._row_tables = [self.states.row_tables(tables) for tables in self._block_tables]
        parts = self.states, *self._block_tables, self.sampler, self._images, self.adapters
        self._carrier = Carrier((each for part in parts for each in part.carried), device)
        self._input_buffers = InputBuffers(
            rows,
            limits.max_num_batched_tokens,
            [tables.tensor.shape[1] for tables in self._block_tables],
            device,
            [group.window for group in own_groups(self._groups)],
        )
        self._result_copier = ResultCopier(device)
        self._launches = recorded_steps(config)
        self._recorded_tokens = self._launches.most_prompt_tokens
        self._attention = attention_of(config, device, self._recorded_tokens)
        self._graphs: CudaGraphManager | None = None
        self.drafts = Drafts(config, self._row_tables[0])
        """Asked for after each step, if decodes have more than one token."""
        self._network = self._create_network(draft)
        self._hands_over = config.is_producer
        self._recorded = RecordedChoices(config, model, self.sampler, self._row_tables[0])
        self._keeps_rows = tower is None and keeps_sampled_rows(config, model)

    def _create_network(self, draft: DraftNetwork | None) -> NetworkDrafter | None:
        if draft is None:
            return None
        given = self._config, draft, self.sampler.draw, self._attention
        drafter = NetworkDrafter(*given, self._block_tables, self._row_tables, self._device)
        self.drafts.drafter = drafter
        return drafter

    def use_cache(self, kv_cache: KVCache) -> None:
        """Takes the cache that the next steps read and write."""
        self.kv_caches, self.kv_pages = kv_cache.layers, kv_cache.pages
        if self._network is not None:
            self._network.use_cache(kv_cache.layers, kv_cache.num_blocks)

    @torch.inference_mode()
    def execute_model(self, step: SchedulerOutput) -> AsyncOutput:
        """Runs one step and returns while the device may still work on it.

        Raises:
            RowError: The message does not fit the rows; nothing can be trusted any more.
        """
        self._update_rows(step)
        order = order_batch(
            self._decode_set.rows,
            step.prefill_chunks,
            self.states,
            self._attention,
            self._query_len,
        )
        num_drafts = step.num_drafts if isinstance(step, AdaptiveOutput) else None
        if num_drafts is not None:
            self._query_len = 1 + num_drafts
        rows = order.rows[: order.num_sampled]
        epochs = self.states.epoch_np[rows].tolist()
        if len(order.rows) == 0:
            self._connector.no_forward(step)
            return AsyncOutput(step.step_id, rows, epochs, None, [], self._result_copier)

        on_layer = self._connector.pre_forward(step)
        parts: list[Part] = [(order, None)]
        if not waits_for_layers(step):  # A graph cannot stop at layers.
            draws = self.sampler.only_draws
            parts = parts_of(order, self._graph_key, self._launches, draws)
        found = []
        for number, (part, key) in enumerate(parts, 1):
            after = on_layer if number == len(parts) else ignore_layer
            found.append(self._run(part, key, after, num_drafts))
        sampled, of_prompts = joined([each for each, _ in found]), found[-1][1]
        output = AsyncOutput(step.step_id, rows, epochs, sampled, of_prompts, self._result_copier)
        if self.sampler.grammars.needed_by(rows):
            self.sampler.grammars.step_started(output)
        return output

    def _run(
        self, order: BatchOrder, key: GraphKey | None, on_layer: OnLayer, num_drafts: int | None
    ) -> tuple[SamplerOutput | None, list[PromptLogprobsTensors]]:
        """Runs a step or a part of it, whose rows then are as far as it."""
        self.adapters.begin(rows=order.rows)
        key = self.adapters.of_step(key)
        sampled: SamplerOutput | None
        of_prompts: list[PromptLogprobsTensors] = []
        if key is None:
            sampled, of_prompts = self._run_eagerly(order, on_layer)
        else:
            sampled = self._run_graph(order, key, on_layer)
        self.states.advance(order.rows, order.query_lens)
        if self._network is not None:
            self._network.settle(self._input_buffers.by_group(self._input_buffers.loaded(order)))
            if sampled is not None and self._hands_over:
                features = self._network.last_features(order.num_sampled)
                sampled = replace(sampled, draft_features=features)
        if self._decode_query_len > 1:
            sampled = self._draft(order, sampled, num_drafts)
        return sampled, of_prompts

    def size_of(self, step: SchedulerOutput) -> tuple[int, int]:
        """Returns how many rows will decode in a step that is next, and how many tokens it computes
        in all."""
        left = {*step.finished_rows, *step.decode_remove}
        num_decodes = len(({*self._decode_set.rows.tolist()} - left) | {*step.decode_add})
        of_prompts = sum(count for _, count in step.prefill_chunks)
        return num_decodes, num_decodes * self._query_len + of_prompts

    @property
    def share_of_graphs(self) -> float:
        """Returns the memory of long recorded prompts as a part of the largest step's."""
        tokens = self._recorded_tokens
        return tokens / self._input_buffers.max_num_tokens if tokens > PROMPT_TOKENS[-1] else 0.0

    @torch.inference_mode()
    def capture_model(self, report: Callable[[float], None]) -> None:
        """Records CUDA graphs. `kv_caches` must be in their final place."""
        kinds = self.adapters.kinds, self._network is not None
        graphs = CudaGraphManager(self._launches, self._device, *kinds)
        self._recorded.allocate(graphs.most_places, self._device)
        graphs.capture(with_drafts(self._network, graphs, self._record_step), report)
        self._graphs = graphs

    def drop_graphs(self) -> None:
        """Drops all graphs: decode steps launch their kernels one by one again."""
        self._graphs = None
        self._recorded.drop()
        if self._network is not None:
            self._network.passes.drop_graphs()

    def warm_up(self, report: Callable[[float], None]) -> None:
        """Runs steps of many shapes, so that no kernel is compiled while something waits."""
        attended = self.kv_caches[self._groups[0].layers[0]]
        prepare_attention(self._attention, self._config, attended)
        steps = warm_up_steps(self._config, self._device)
        for index, step in enumerate(steps):
            report(index / len(steps))
            self._dummy_step(step)
        report(1.0)

    def dummy_run(self, num_tokens: int) -> None:
        """Runs the largest steps there may be with `num_tokens` padding tokens, in rows that must
        be free. Warms up, and takes as much memory as any step may. Overwrites the cache's block 0,
        and block 1 where it has states.
        """
        self._images.dummy_run()
        for step in largest_of(self._attention, self._config, self._device, num_tokens):
            self._dummy_step(step)

    def _dummy_step(self, dummy: DummyStep) -> None:
        for _ in self.adapters.each_kind():
            for step in dummy.messages(self._config, num_blocks=self.kv_pages.shape[1]):
                self.execute_model(step).get_output()

    def _update_rows(self, step: SchedulerOutput) -> None:
        for row in step.finished_rows:
            self._remove_request(row)
        for new in step.new_reqs:
            self._add_request(new)
        for table, block_ids in step.new_block_ids:
            row, group = divmod(table, len(self._block_tables))
            self.states.check_live(row)
            self._block_tables[group].append(row, block_ids)
        for row in step.decode_remove:
            self._decode_set.remove_request(row)
        begun = [row for row in step.decode_add if self._start_decoding(row)]
        self._carrier.carry_over()
        self.drafts.begin(begun)
        if self._network is not None:
            for new in step.new_reqs:
                self._network.take_pulled(new)
        if step.block_copies:
            copies = to_device(np.array(step.block_copies, np.int32), self._device)
            ops.copy_blocks(self.kv_pages, copies)
            if self._network is not None:
                self._network.features.copy_blocks(copies)
        self._images.run(step)

    def _add_request(self, new: NewRequestData) -> None:
        self.states.add_request(new)
        self._block_tables[0].add_request(new.row, new.block_ids)
        self._images.add_request(new)
        self.sampler.add_request(new)
        self._beams.add_request(new)
        self.adapters.add_request(new)
        self._prompt_logprobs.add_request(new)

    def _remove_request(self, row: int) -> None:
        self.states.remove_request(row)
        for tables in self._block_tables:
            tables.remove_request(row)
        self._decode_set.remove_request(row)
        self.sampler.remove_request(row)
        self._beams.remove_request(row)
        self.adapters.remove_request(row)
        self._prompt_logprobs.remove_request(row)

    def _start_decoding(self, row: int) -> bool:
        """Returns whether no step has drafted for the row: its last known token is to compute."""
        self.states.check_live(row)
        uncomputed = self.states.num_uncomputed_prefill(row)
        if uncomputed > 1:
            raise RowError(f"row {row} cannot decode: {uncomputed} tokens are not computed yet")
        self._decode_set.add_request(row)
        return uncomputed == 1

    def _graph_key(self, order: BatchOrder) -> GraphKey | None:
        """Returns the graph of a step; None: there is none. To those with prompts all requests are
        prompts, whose states have all tokens before."""
        if self._graphs is None or self._images.needed_by(order, self.states):
            return None
        if order.num_decodes < len(order.rows):
            is_recordable = not order.has_pending and self._attention.graph_ok(order)
            if not is_recordable or self._prompt_logprobs.needed_by(order):
                return None
        key = self._graphs.launches.find(order.parts(samples=self.sampler.only_draws(order.rows)))
        return key if isinstance(key, GraphKey) else None

    def _run_eagerly(
        self, order: BatchOrder, on_layer: OnLayer
    ) -> tuple[SamplerOutput | None, list[PromptLogprobsTensors]]:
        batch = self._input_buffers.prepare(order, self._row_tables)
        wanted = None if self._prompt_logprobs.needed_by(order) else batch.sampled_rows
        hidden = self._forward(batch, on_layer, wanted)
        of_prompts = self._prompt_logprobs.compute(
            order, hidden, self.states, self._model.compute_logits
        )
        if wanted is None:
            hidden = hidden.index_select(0, batch.sampled_rows)
        sampled = self._sample(hidden, batch)
        self._advance_rows(batch, sampled)
        return sampled, of_prompts

    def _run_graph(
        self, order: BatchOrder, key: GraphKey, on_layer: OnLayer
    ) -> SamplerOutput | None:
        assert self._graphs is not None
        self._input_buffers.load(order, key.num_reqs)
        self._graphs.replay(key)
        for layer in range(len(self.kv_caches)):
            on_layer(layer)
        if key.samples:
            return SamplerOutput(self._recorded.tokens(key, order), None)
        batch = self._input_buffers.loaded(order)
        sampled = None
        if order.num_sampled > 0:
            sampled = self._choose(self._recorded.logits(key, order), batch)
        self._advance_rows(batch, sampled)
        return sampled

    def _record_step(self, key: GraphKey) -> None:
        """Runs what a graph holds, of decodes or of prompts, for none: rows are -1, lengths 0."""
        batch = self._input_buffers.load_padding(key)
        self._input_buffers.gather(key.num_reqs, self._row_tables)
        self.adapters.has_any = key.adapters
        hides = self._recorded.places(key, batch)
        ends = None if key.decodes else batch.logits_indices.clamp(min=0)
        ends = ends if hides is None else hides.indices
        hidden = self._forward(batch, lambda layer: None, ends)  # Graphs hold no call to the host.
        self._recorded.choose(key, batch, hidden, hides)

    def _forward(
        self, batch: InputBatch, on_layer: OnLayer, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns hidden states of the tokens `wanted`; None: of all."""
        keeps = wanted is not None and self._keeps_rows and len(wanted) < batch.num_tokens
        self.adapters.apply_to(batch)
        by_group = self._input_buffers.by_group(batch)
        ends = keeps and attends_ends(batch, self._recorded_tokens)
        given, taken = (self._groups, by_group, self._attention), self._row_tables[0].num_taken
        groups = group_inputs(*given, num_taken=taken, most=self._decode_query_len, keeps_ends=ends)
        network = self._network
        positions, images = self._images.inputs(batch, self.states)
        taps = Taps(network.taps) if network is not None and network.taps else None
        caches = self.kv_caches if network is None else self.kv_caches[: network.first_layer]
        rest = self._attention, on_layer, taps, images, wanted if keeps else None
        step = ForwardInputs(batch.input_ids, positions, groups, caches, *rest)
        hidden: torch.Tensor = self._model(step)
        if network is not None:
            streams = [] if taps is None else taps.streams
            network.follow(batch, groups, by_group, hidden, streams, on_layer)
        return hidden if keeps or wanted is None else hidden.index_select(0, wanted)

    def _sample(self, hidden: torch.Tensor, batch: InputBatch) -> SamplerOutput | None:
        """Returns None when only unfinished prompts ran."""
        if batch.order.num_sampled == 0:
            return None
        return self._choose(self._model.compute_choices(hidden), batch)

    def _choose(self, logits: torch.Tensor | VocabPart, batch: InputBatch) -> SamplerOutput:
        rows = batch.order.rows[: batch.order.num_sampled]
        return self._beams.choose(self.sampler(logits, batch), rows, self.kv_pages)

    def _advance_rows(self, batch: InputBatch, sampled: SamplerOutput | None) -> None:
        shape = (batch.num_reqs, batch.order.decode_query_len)
        token_ids = torch.full(shape, NO_TOKEN, dtype=torch.int64, device=self._device)
        if sampled is not None:
            token_ids[: batch.order.num_sampled] = sampled.token_ids
        batch.update_rows(token_ids, self._row_tables[0])

    def _draft(
        self, order: BatchOrder, sampled: SamplerOutput | None, num_drafts: int | None
    ) -> SamplerOutput | None:
        """Asks for drafts of the rows that got tokens. Returns `sampled` with the number of drafts
        that this step has checked."""
        self.states.limit(order.rows, self._block_tables[0].num_slots(order.rows))
        if sampled is None:
            return None
        rows = self._input_buffers.idx_mapping(len(order.rows))
        sampled = replace(sampled, num_drafts=self.drafts.num_checked(order, rows))
        forced = self.sampler.grammars.take_forced()
        self.drafts.propose(order, rows, sampled.token_ids, forced, num_drafts)
        return sampled

"""Ends recorded steps: with the next tokens of their requests, or with logits.

    1. `places`  before the model runs: which of a step's tokens have logits, if the host cannot say
    2. `choose`  behind it: draws tokens and advances rows, or keeps the logits
    3. `tokens`, `logits`   what a replay has left of a step, in the step's own order

Graphs hold 1 and 2.
"""

from __future__ import annotations

import torch

from engine.batch.buffer_utils import to_device
from engine.batch.hidden_places import HiddenPlaces, places_in_recorded
from engine.batch.input_batch import BatchOrder, InputBatch
from engine.config import EngineConfig
from engine.contracts.steps.step_launches import GraphKey
from engine.layers.vocabulary.vocab_part import VocabPart
from engine.models.base import CausalLM
from engine.sample.sampler import Sampler
from engine.worker.graphs.kept_logits import KeptLogits
from tandem_kernels.batch.batch_tables import RowTables


class RecordedChoices:
    """Chooses the tokens of recorded steps for one rank."""

    def __init__(
        self, config: EngineConfig, model: CausalLM, sampler: Sampler, rows: RowTables
    ) -> None:
        self._model, self._sampler, self._rows = model, sampler, rows
        self._logits = KeptLogits(config, model)
        self._tokens: dict[GraphKey, torch.Tensor] = {}
        """[requests, width] int64, written by each graph that samples."""

    def allocate(self, num_places: int, device: torch.device) -> None:
        """Makes room for the logits of a step with this many places."""
        self._logits.allocate(num_places, device)

    def drop(self) -> None:
        """Forgets what graphs have written."""
        self._tokens.clear()

    def places(self, key: GraphKey, batch: InputBatch) -> HiddenPlaces | None:
        """Returns where a step with prompts beside drafts chooses; None: as its order says."""
        return HiddenPlaces.of(batch, key.draft_width, self._rows) if key.draft_width else None

    def choose(
        self, key: GraphKey, batch: InputBatch, hidden: torch.Tensor, hides: HiddenPlaces | None
    ) -> None:
        """Ends a step. `hidden` [L, H] is in front of its places."""
        if not key.samples:
            self._logits.write(hidden)
            return
        places = batch.places() if hides is None else hides
        logits = self._model.compute_choices(hidden)
        token_ids = places.accept(self._sampler.draw(logits, places.idx_mapping, places.seq_lens))
        batch.update_rows(token_ids, self._rows)
        self._tokens[key] = token_ids

    def tokens(self, key: GraphKey, order: BatchOrder) -> torch.Tensor:
        """Returns [S, W] int64, what a step that samples has chosen for its requests. A copy: the
        next replay overwrites its own output, maybe before this one is read."""
        found = self._tokens[key][: len(order.rows)]
        return found[:, : order.decode_query_len].clone() if key.draft_width else found.clone()

    def logits(self, key: GraphKey, order: BatchOrder) -> torch.Tensor | VocabPart:
        """Returns the logits of a step's places, [L, vocabulary] float32."""
        found = self._logits.read(order.num_sampled * key.width)
        if not key.draft_width:
            return found
        whole = found.logits if isinstance(found, VocabPart) else found
        index = to_device(places_in_recorded(order, key.width), whole.device)
        rows = whole.index_select(0, index)
        return VocabPart(rows, found.cut) if isinstance(found, VocabPart) else rows

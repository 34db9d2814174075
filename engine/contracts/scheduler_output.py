"""The step message: scheduler to all workers, identical for every rank.

A request's data travels once (`NewRequestData`); afterwards only what a worker cannot know.
Workers own the truth about their rows: tokens, positions and counts are never sent again. A
steady decode step carries `step_id` and the blocks that became necessary, nothing else.

Rows: the scheduler assigns each live request one row of the workers' tables. A row is released
by `finished_rows` (finished, aborted and preempted are the same) before anything else of the
step is applied, so a row may be released and given away in one message.

Order in which a worker applies a step:
    1. `finished_rows` leave (also the decode set).
    2. `new_reqs` enter.
    3. `new_block_ids` are appended.
    4. `decode_add` and `decode_remove` change the set of rows that compute one token.
    5. `block_copies` are made, behind all earlier steps; `images` are encoded.
    6. The step computes `prefill_chunks` and one token for each row of the decode set.

A row whose chunk completes its prefill samples a token in that step. It does not decode until
`decode_add` names it in a later step. A row of which one known token is to compute may decode with
no chunk before: so a step in which a request begins is one of decodes.

Rows of a beam search enter, decode and leave together. Behind each step their beams change places
among them, tokens, tables and all; what steps name is always the row.
"""

from __future__ import annotations

import msgspec

from engine.contracts.sampling_params import SamplingParams
from engine.images.image_input import EncoderWork, ImageSpan
from kv_transfer.metadata import KVConnectorMetadata

BYTES_OF_TOKEN = 4
"""In `NewRequestData`."""


class PulledDrafts(msgspec.Struct, array_like=True):
    """Tells a drafter with KV of its own what a peer gave of a request.

    Attributes:
        first_token: From here on the KV is the peer's.
        has_kv: The drafter's is among it.
        feature: That of the last computed token, in numbers of the model's dtype; empty: unknown.
    """

    first_token: int
    has_kv: bool
    feature: bytes


class LoRASlot(msgspec.Struct, frozen=True, array_like=True):
    """Tells which slot a request's adapter is in: workers fill it, unless it is there already."""

    index: int
    digest: str


class BeamSeat(msgspec.Struct, frozen=True, array_like=True):
    """Tells that a row has a beam of a search whose beams all keep their rows: from the step on in
    which the last of them comes, workers choose the next beams (`engine.worker.rows.beam_rows`).

    Attributes:
        search: Its number.
        index: The seat, of `width`. As they come, beams sit in their order, the best first.
        score: The sum of log probabilities so far.
        stop_ids: Tokens that end an answer, so that no beam goes on behind them.
        num_candidates: Tokens that each beam's row finds, of which the next beams are chosen.
    """

    search: int
    index: int
    width: int
    score: float
    stop_ids: tuple[int, ...]
    num_candidates: int


class NewRequestData(msgspec.Struct, array_like=True):
    """A request enters a row.

    Attributes:
        row: Index into the workers' tables.
        epoch: Tags results of this owner of the row.
        prompt_len: Tokens of the user's prompt.
        prefill_token_ids: Little-endian int32 of known tokens: the prompt, and output that exists
            already (after a preemption, a resume, or a first token from a peer).
        num_computed_tokens: Leading tokens whose KV is in the blocks.
        block_ids: The row's block table so far, in the first KV group. Those of other groups
            follow in `new_block_ids` of the same step.
        max_len: Tokens at which the row stops writing KV, whatever happens.
        eos_token_ids: Masked before `sampling.min_tokens`, with the request's stop tokens.
        sibling_seeds: With its own token, the row draws one for each of these, from the same
            logits.
        pulled: KV that came from a peer, if a drafter must know; None: nothing to know.
        images: Those of the prompt.
        lora: Where the request's adapter is; None: it has none.
        first_token: `prefill_token_ids` begin here. Those before have KV, and nothing that the
            request asks for looks at them, as with beams.
        beam: Its seat, of a beam that keeps its row.
    """

    row: int
    epoch: int
    prompt_len: int
    prefill_token_ids: bytes
    num_computed_tokens: int
    block_ids: list[int]
    max_len: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    sibling_seeds: tuple[int, ...] = ()
    pulled: PulledDrafts | None = None
    images: tuple[ImageSpan, ...] = ()
    lora: LoRASlot | None = None
    first_token: int = 0
    beam: BeamSeat | None = None

    @property
    def prefill_len(self) -> int:
        """Returns the number of known tokens."""
        return self.first_token + len(self.prefill_token_ids) // BYTES_OF_TOKEN


class SchedulerOutput(msgspec.Struct, array_like=True):
    """One step. `step_id` grows by one; a worker that misses one has lost its state and ends."""

    step_id: int
    finished_rows: list[int] = []
    new_reqs: list[NewRequestData] = []
    new_block_ids: list[tuple[int, list[int]]] = []
    """Pairs (row * number of KV groups + group, blocks to append)."""
    prefill_chunks: list[tuple[int, int]] = []
    """Pairs (row, tokens to compute) of rows still inside their prefill."""
    decode_add: list[int] = []
    decode_remove: list[int] = []
    kv: KVConnectorMetadata | None = None
    block_copies: list[tuple[int, int]] = []
    """Pairs (source, target) of blocks to copy, over all layers. No target is a source."""


class AdaptiveOutput(SchedulerOutput, array_like=True):
    """A step of an engine whose steps differ in their drafts. The others' messages stay as they
    are."""

    num_drafts: int | None = None
    """Drafts to make behind this step: in the next one each decode computes one token more. None:
    as many as the setting says."""


class EncodingOutput(AdaptiveOutput, array_like=True):
    """A step that encodes images before it computes tokens, or drops embeddings."""

    images: EncoderWork = EncoderWork()

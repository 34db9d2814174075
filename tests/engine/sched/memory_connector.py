"""A connector whose transfers really write and read the fake worker's memory.

The test decides when anything happens: `advance` moves one transfer by a piece. A consumer's
writer goes on, with garbage, after it was told to stop, until the test lets it report that it has
stopped. A producer's reader checks what it reads until the moment it reports STAGED. So a block
that is given to somebody else too early, in either direction, breaks some request's KV.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.base import ChunkLike, KVConnectorScheduler, RequestLike
from kv_transfer.layout import BlockIds, KVLayout, attention_group
from kv_transfer.metadata import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVPeer,
    KVTransferParams,
    TransferName,
    TransferStats,
)
from tests.engine.sched.fake_worker import PagedMemory, kv_of
from tests.engine.sched.memory_host_tier import MemoryHostTier

_GARBAGE = (-7, -7)
_MOST_MOVES = 1000
"""A transfer takes no more than these and one for each token, if nothing holds it up."""


@dataclass(slots=True)
class PullJob:
    """A transfer into `block_ids`."""

    prompt: Sequence[int]
    block_ids: BlockIds
    position: int
    attempt: int
    is_prefix: bool = False
    """Windows come in whole blocks."""
    stopping: bool = False

    @property
    def is_complete(self) -> bool:
        return self.position == len(self.prompt)

    def whole_blocks(self, memory: PagedMemory) -> int:
        """Returns the tokens before the block that is being written."""
        return min(self.position // g.block_size * g.block_size for g in memory.groups)


@dataclass(slots=True)
class ExportJob:
    """A transfer out of blocks, `sent` tokens of which are copied."""

    prompt: Sequence[int]
    attempt: int
    block_ids: BlockIds = ()
    num_cached: int = 0
    chunks: list[tuple[int, int]] = field(default_factory=list)
    """The (step, leading tokens with KV once it is done)."""
    sent: int = 0
    is_staged: bool = False
    stopping: bool = False
    exists: bool = False
    """Its KV is no prompt's that is computed now; what is known of the prompt is checked."""
    rows: list[list[tuple[int, int] | None]] = field(default_factory=list)
    """Holds the rows of blocks that existed before, as they were when they were said to."""
    replaced: list[ExportJob] = field(default_factory=list)
    """Earlier attempts, whose readers may go on until this one is read."""


class MemoryConnector(KVConnectorScheduler):
    """Both roles. `prompts[request_id]` must be known before the request is added, and grow with
    its answer: behind a preemption a peer may have more of it than the prompt."""

    def __init__(
        self, memory: PagedMemory, rng: random.Random, host: MemoryHostTier | None = None
    ) -> None:
        self.memory = memory
        self.host = host
        self.host_tier = host.tier if host is not None else None
        self.prompts: dict[str, Sequence[int]] = {}
        self.pulls: dict[str, PullJob] = {}
        self.exports: dict[str, ExportJob] = {}
        self.computed: list[tuple[str, int]] = []
        """Pairs (transfer id, attempt) of pulls whose prompt the peer was said to have computed."""
        self.done_step = -1
        """The last step that the worker has run."""
        self.tokens_received = 0
        self._rng = rng
        self._events = KVConnectorOutput()

    # The contract -----------------------------------------------------------------------------

    @property
    def peer_info(self) -> KVPeer:
        layout = KVLayout(
            groups=(
                attention_group(layers=[0], heads=1, head_dim=1, dtype="float32", block_size=1),
            ),
            tp_size=1,
            model_hash="",
        )
        return KVPeer(engine_id="test", epoch=1, layout=layout)

    def get_num_new_matched_tokens(self, request: RequestLike, num_computed_tokens: int) -> int:
        return request.num_prompt_tokens - num_computed_tokens

    def update_state_after_alloc(
        self, request: RequestLike, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        params = _params(request)
        if params.do_remote_decode and block_ids:
            num_tokens = request.num_prompt_tokens
            job = ExportJob([], params.attempt, block_ids, num_cached=num_tokens, exists=True)
            self.exports[params.transfer_id] = job
            return
        prompt = self.prompts[request.request_id][: request.num_prompt_tokens]
        if params.do_remote_decode:
            job = ExportJob(prompt, params.attempt)
            if (earlier := self.exports.get(params.transfer_id)) is not None:
                assert earlier.attempt < params.attempt
                if not earlier.is_staged:
                    job.replaced = [*earlier.replaced, earlier]
            self.exports[params.transfer_id] = job
        else:
            self._pull(params, prompt, block_ids, len(prompt) - num_external_tokens)

    def retry(
        self,
        request: RequestLike,
        params: KVTransferParams,
        block_ids: BlockIds,
        num_computed_tokens: int,
    ) -> None:
        prompt = self.prompts[request.request_id][: request.num_prompt_tokens]
        self._pull(params, prompt, block_ids, num_computed_tokens)

    def _pull(
        self, params: KVTransferParams, prompt: Sequence[int], block_ids: BlockIds, first: int
    ) -> None:
        assert params.transfer_id not in self.pulls, "an attempt begins while another one writes"
        job = PullJob(prompt, block_ids, first, params.attempt, params.is_prefix)
        self.pulls[params.transfer_id] = job

    def prompt_computed(self, request: RequestLike) -> None:
        params = _params(request)
        if params.transfer_id in self.pulls:
            self.computed.append((params.transfer_id, params.attempt))

    def build_connector_meta(
        self, step_id: int, chunks: list[ChunkLike]
    ) -> KVConnectorMetadata | None:
        for chunk in chunks:
            export = self._export(chunk.request)
            if export is not None:
                if not export.chunks:
                    export.num_cached = chunk.first_token
                export.block_ids = chunk.block_ids
                export.chunks.append((step_id, chunk.first_token + chunk.num_tokens))
        return KVConnectorMetadata(save_kv=True) if chunks else None

    def fileno(self) -> int:
        return -1

    def get_finished(self) -> KVConnectorOutput | None:
        events, self._events = self._events, KVConnectorOutput()
        if self.host_tier is not None:
            events.host_jobs = self.host_tier.take_finished()
            events.host_begun = self.host_tier.take_begun()
            if self.host_tier.store_index is not None:
                events.store_found = self.host_tier.store_index.take_found()
        return events

    def request_finished(self, request: RequestLike) -> bool:
        export = self._export(request)
        if export is not None and export.exists:
            export.rows = self._rows(export)
        return export is not None and not export.is_staged

    def abort(self, request: RequestLike) -> bool:
        params = _params(request)
        job = self._job(params.transfer_id)
        if job is None or job.attempt != params.attempt:
            return False
        job.stopping = True
        return True

    @property
    def counters(self) -> dict[str, float]:
        return {"tokens": float(self.tokens_received)}

    def check_alive(self) -> None:
        return

    def shutdown(self) -> None:
        return

    # What the test decides --------------------------------------------------------------------

    def transfer_ids(self) -> list[str]:
        return [*self.pulls, *self.exports]

    def advance(self, transfer_id: str) -> None:
        """Moves the transfer by a piece."""
        job = self._job(transfer_id)
        if isinstance(job, PullJob):
            self._advance_pull(transfer_id, job)
        elif isinstance(job, ExportJob):
            self._advance_export(transfer_id, job)

    def fail(self, transfer_id: str, *, tells_part: bool = True) -> None:
        """Fails the pull: nobody touches the blocks from now on. `tells_part`: what has come is
        known to be complete.
        """
        pull = self.pulls.get(transfer_id)
        name = self._end(transfer_id)
        if pull is not None and tells_part:
            self._events.num_tokens_kept[name] = pull.position
        self._events.failed[name] = ("the test wanted it", True)

    def finish(self, transfer_id: str) -> None:
        """Moves the transfer to its end. Raises AssertionError for one that waits for others."""
        job = self._job(transfer_id)
        for _ in range(_MOST_MOVES + len(job.prompt) if job is not None else 0):
            if self._job(transfer_id) is None:
                return
            self.advance(transfer_id)
        assert self._job(transfer_id) is None, f"transfer {transfer_id} does not end: {job}"

    def _advance_pull(self, transfer_id: str, job: PullJob) -> None:
        num_tokens = len(job.prompt)
        if job.stopping:
            for group, table in zip(self.memory.groups, job.block_ids, strict=True):
                begin = max(job.position // group.block_size, group.first_block_seen(num_tokens))
                for block_id in table[begin:]:
                    self.memory.slots[block_id][-1] = _GARBAGE
                    if group.is_state:
                        self.memory.slots[block_id][0] = _GARBAGE
            if self._rng.random() < 0.5:
                name = self._end(transfer_id)
                self._events.aborted.append(name)
                self._events.num_tokens_kept[name] = job.whole_blocks(self.memory)
            return
        states = kv_of(job.prompt)
        stop = min(len(job.prompt), job.position + self._rng.randint(1, 12))
        for position in range(job.position, stop):
            self.memory.write(
                job.block_ids, position, states[position], num_tokens, whole=job.is_prefix
            )
        job.position = stop
        if job.is_complete:
            name = self._end(transfer_id)
            self._events.finished_recving.append(name)
            self._events.stats[name] = TransferStats(num_bytes=len(job.prompt))

    def _advance_export(self, transfer_id: str, job: ExportJob) -> None:
        if job.is_staged:
            self._events.released.append(self._end(transfer_id))
            return
        for earlier in job.replaced:
            self._read(earlier)
        if job.stopping and self._rng.random() < 0.5:
            self._events.aborted.append(self._end(transfer_id))
            return
        if job.exists:
            if not job.rows:
                return
            assert self._rows(job) == job.rows
            self.memory.check(job.block_ids, kv_of(job.prompt), len(job.prompt), len(job.prompt))
            job.is_staged = True
            self._events.finished_sending.append(TransferName(transfer_id, job.attempt))
            return
        job.sent = self._read(job)
        if job.sent == len(job.prompt):
            job.is_staged = True
            self._events.finished_sending.append(TransferName(transfer_id, job.attempt))

    def _read(self, job: ExportJob) -> int:
        """Reads all that is computed, and returns how many tokens that is."""
        ready = max([job.num_cached, *(n for step, n in job.chunks if step <= self.done_step)])
        if ready > 0:
            self.memory.check(job.block_ids, kv_of(job.prompt), ready, len(job.prompt))
        return ready

    def _export(self, request: RequestLike) -> ExportJob | None:
        """Returns the export of the request's own attempt."""
        params = _params(request)
        job = self.exports.get(params.transfer_id)
        return job if job is not None and job.attempt == params.attempt else None

    def _rows(self, job: ExportJob) -> list[list[tuple[int, int] | None]]:
        """Returns what blocks hold that the token behind a prefix sees."""
        seen = [
            table[group.first_block_seen(job.num_cached) :]
            for group, table in zip(self.memory.groups, job.block_ids, strict=True)
        ]
        return [list(self.memory.slots[block]) for table in seen for block in table]

    def _job(self, transfer_id: str) -> PullJob | ExportJob | None:
        return self.pulls.get(transfer_id) or self.exports.get(transfer_id)

    def _end(self, transfer_id: str) -> TransferName:
        job = self.pulls.pop(transfer_id, None) or self.exports.pop(transfer_id)
        return TransferName(transfer_id, job.attempt)


def _params(request: RequestLike) -> KVTransferParams:
    assert request.kv_transfer_params is not None
    return request.kv_transfer_params

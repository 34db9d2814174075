"""The results of a step: from a worker to the scheduler, and from the scheduler outwards."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import islice

import msgspec

DURATION_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0)
"""Seconds, upper bounds, of `Durations`."""

RESIDENCY_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)
"""Seconds, upper bounds, of `BlockTimes`."""

STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of `TokensPerStep`."""


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log probabilities at one position, of the raw logits' softmax.

    Index 0 is the chosen token, then the top k in falling order. `rank` is 1 for the most likely.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Log probabilities of N prompt tokens in a row, each given what comes before it. Packed,
    because prompts are long: native byte order, 32 bits each.

    Attributes:
        first_position: Index in the prompt of the first of them, at least 1.
        num_top: K, the top tokens at each position.
        token_ids: int32 [N, 1 + K], the prompt's token first, then the top k in falling order.
        logprobs: float32 [N, 1 + K].
        ranks: int32 [N], of the prompt's token.
    """

    first_position: int
    num_top: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes

    def unpack(self) -> list[TokenLogprobs]:
        """Returns one entry for each token."""
        width = 1 + self.num_top
        token_ids = array("i", self.token_ids).tolist()
        logprobs = array("f", self.logprobs).tolist()
        ranks = array("i", self.ranks).tolist()
        return [
            TokenLogprobs(
                token_ids[i * width : (i + 1) * width], logprobs[i * width : (i + 1) * width], rank
            )
            for i, rank in enumerate(ranks)
        ]


class RowPromptLogprobs(msgspec.Struct, array_like=True):
    """The part that one step found of the prompt in (row, epoch)."""

    row: int
    epoch: int
    logprobs: PromptLogprobs


class SiblingTokens(msgspec.Struct, array_like=True):
    """The first tokens of a prompt's answers beyond the first, in the order of their seeds.
    `logprobs` is empty when nothing asked."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []


class RowSiblings(msgspec.Struct, array_like=True):
    """Names (row, epoch), and what it drew for further answers with its own token."""

    row: int
    epoch: int
    tokens: SiblingTokens


class RowFailure(msgspec.Struct, array_like=True):
    """The request in (row, epoch) cannot go on, though all others can. `reason` is for the client:
    what was wrong."""

    row: int
    epoch: int
    reason: str


class StepDrafts(msgspec.Struct, array_like=True):
    """Tells what a step's drafts were, and what drafting goes on from elsewhere.

    Attributes:
        counts: The number of drafts that the step checked of each request; empty: of none.
        features: What a drafter reads of the last token of each row whose prompt ended, on a node
            that hands its KV over.
    """

    counts: list[int] = []
    features: dict[int, bytes] = {}


class ModelRunnerOutput(msgspec.Struct, array_like=True):
    """One step's result, of the requests that sampled in it.

    `(rows[i], epochs[i])` names one: a row is used again with a higher epoch, so a late result
    of an earlier owner is recognised and dropped. Its tokens are the next `counts[i]` of
    `token_ids`.
    """

    step_id: int
    rows: list[int]
    epochs: list[int]
    token_ids: list[int]
    """Tokens of all requests, one after the other."""
    logprobs: dict[int, TokenLogprobs] = {}
    """Log probabilities by index in `token_ids`; only for requests that asked."""
    prompt_logprobs: list[RowPromptLogprobs] = []
    """Log probabilities of prompts, or parts of them, that the step computed; only for requests
    that asked."""
    counts: list[int] = []
    """The number of tokens that each request has, at least 1, unless it is among `failures`. Empty
    when each has one."""
    failures: list[RowFailure] = []
    """Requests that end with an error, behind the tokens that they have here."""
    siblings: list[RowSiblings] = []
    """Tokens of requests that draw for several answers, beyond their own."""
    drafts: StepDrafts | None = None
    """Tells of drafts; None when nothing drafts."""

    def tokens_by_request(self) -> list[list[int]]:
        """Returns the tokens of each request, in new lists."""
        if not self.counts:
            return [[token_id] for token_id in self.token_ids]
        tokens = iter(self.token_ids)
        return [list(islice(tokens, count)) for count in self.counts]

    def siblings_by_row(self) -> dict[int, SiblingTokens]:
        """Returns what rows drew for further answers."""
        return {found.row: found.tokens for found in self.siblings}

    def features_by_row(self) -> dict[int, bytes]:
        """Returns what drafting goes on from elsewhere, behind prompts that have ended."""
        return {} if self.drafts is None else self.drafts.features

    def logprobs_by_row(self) -> dict[int, list[TokenLogprobs]]:
        """Returns, for each row that asked, one entry for each of its tokens."""
        found: dict[int, list[TokenLogprobs]] = {}
        if not self.logprobs:
            return found
        start = 0
        for row, count in zip(self.rows, self.counts or [1] * len(self.rows), strict=True):
            if start in self.logprobs:
                found[row] = [self.logprobs[place] for place in range(start, start + count)]
            start += count
        return found


class Durations(msgspec.Struct, array_like=True):
    """How long something took, as a histogram. `counts[i]` is the number of times that took up to
    `DURATION_BUCKETS[i]`, but more than the bucket before; the last, longer than all."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(DURATION_BUCKETS) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(DURATION_BUCKETS, seconds)] += 1
        self.total_s += seconds


class TokensPerStep(msgspec.Struct, array_like=True):
    """How many tokens steps computed, as a histogram, by `STEP_TOKEN_BUCKETS`."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_TOKEN_BUCKETS) + 1))
    total: int = 0

    def add(self, num_tokens: int) -> None:
        self.counts[bisect_left(STEP_TOKEN_BUCKETS, num_tokens)] += 1
        self.total += num_tokens


class BlockTimes(Durations, array_like=True):
    """Durations of blocks, by `RESIDENCY_BUCKETS`."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(RESIDENCY_BUCKETS) + 1))

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(RESIDENCY_BUCKETS, seconds)] += 1
        self.total_s += seconds


class ResidencyStats(msgspec.Struct, array_like=True):
    """Tells of the watched blocks of the KV cache.

    Attributes:
        lifetime: From the allocation of a block until its content is evicted.
        idle_before_evict: From its last use until then.
        reuse_gap: From a use to the next, of one that is found by another request.
    """

    lifetime: BlockTimes = msgspec.field(default_factory=BlockTimes)
    idle_before_evict: BlockTimes = msgspec.field(default_factory=BlockTimes)
    reuse_gap: BlockTimes = msgspec.field(default_factory=BlockTimes)


class KindRates(msgspec.Struct, array_like=True):
    """Sums over the latest steps of one kind, in which older ones count less."""

    flops: float = 0.0
    num_bytes: float = 0.0
    seconds: float = 0.0

    def add(self, decay: float, flops: float, num_bytes: float, seconds: float) -> None:
        self.flops = self.flops * decay + flops
        self.num_bytes = self.num_bytes * decay + num_bytes
        self.seconds = self.seconds * decay + seconds


class WorkStats(msgspec.Struct, array_like=True):
    """Totals of what one GPU has computed and moved, by the model's own cost, and rates by the kind
    of a step: prefill, decode or mixed."""

    flops: float = 0.0
    read_bytes: float = 0.0
    write_bytes: float = 0.0
    kinds: dict[str, KindRates] = {}


class LoRAStats(msgspec.Struct, array_like=True):
    """Tells which adapters have requests, and which are in host memory, all by digest."""

    running: list[str] = []
    waiting: list[str] = []
    loaded: list[str] = []


class GrammarStats(msgspec.Struct, array_like=True):
    """Counts what grammars have cost the first worker so far.

    Attributes:
        compiling: Of each grammar, in a thread beside the steps.
        waiting: What steps waited for it: once for each grammar.
        filling: Masks of a step, all together.
        num_masks: Masks that were filled.
        num_failed: Requests that ended because their grammar could not be followed.
    """

    compiling: Durations = msgspec.field(default_factory=Durations)
    waiting: Durations = msgspec.field(default_factory=Durations)
    filling: Durations = msgspec.field(default_factory=Durations)
    num_masks: int = 0
    num_failed: int = 0

    @property
    def has_any(self) -> bool:
        """Returns whether any grammar has come."""
        return any(self.compiling.counts)

    def compiled(self, seconds: float, waited: float, *, failed: bool) -> None:
        """Counts a grammar that was compiled, or could not be."""
        self.compiling.add(seconds)
        self.waiting.add(waited)
        self.num_failed += failed

    def masks_filled(self, count: int, seconds: float) -> None:
        """Counts the masks of a step."""
        self.filling.add(seconds)
        self.num_masks += count


class ExpertStats(msgspec.Struct, frozen=True, array_like=True):
    """Says how evenly experts are chosen, where ranks balance them.

    Attributes:
        balancedness: The mean load of ranks by the highest, of all layers together, in the last
            steps that counted: 1 is even.
        planned_balancedness: What it would have been with the placement that followed.
        num_rearrangements: Times that layers were placed anew.
        num_moved: Experts that ranks have got, all together.
    """

    balancedness: float = 1.0
    planned_balancedness: float = 1.0
    num_rearrangements: int = 0
    num_moved: int = 0


class DraftStats(msgspec.Struct, array_like=True):
    """Counts drafts of all requests so far.

    Attributes:
        num_drafts: Times that a request had drafts in a step.
        num_draft_tokens: Drafts, all together.
        num_accepted_tokens: Those that were right, with all before them.
        num_accepted_per_pos: The same by place in a step, the first at index 0.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_pos: list[int] = []

    def add_step(self, num_drafts: list[int], num_tokens: list[int]) -> None:
        """Counts a step, in which each request had `num_drafts` and got `num_tokens` tokens."""
        for count, of_request in zip(num_drafts, num_tokens, strict=True):
            if count == 0:
                continue
            self.num_drafts += 1
            self.num_draft_tokens += count
            accepted = max(0, min(count, of_request - 1))
            self.num_accepted_tokens += accepted
            missing = count - len(self.num_accepted_per_pos)
            self.num_accepted_per_pos += [0] * missing
            for place in range(accepted):
                self.num_accepted_per_pos[place] += 1


class ImageStats(msgspec.Struct, frozen=True):
    """Counts what became of images.

    Attributes:
        num_queries: Times that a request came to an image.
        num_hits: Of these, how often its embeddings were there.
        num_encoded_tokens: Tokens of images that were encoded.
    """

    num_queries: int
    num_hits: int
    num_encoded_tokens: int


class GroupStats(msgspec.Struct, array_like=True):
    """Tells what one data-parallel group has to do, and what it found in its cache so far."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_free_blocks: int
    num_total_blocks: int
    prompt_tokens_cached: int
    prompt_tokens_computed: int


class SchedulerStats(msgspec.Struct, kw_only=True):
    """State of one engine after a step. Counters are totals since the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_remote_kvs: int = 0
    num_waiting_tokens: int = 0
    num_idle_class: int = 0
    num_free_blocks: int = 0
    num_total_blocks: int = 0
    num_free_rows: int = 0
    num_delayed_frees: int = 0
    """Requests that ended and whose blocks a transfer still holds."""
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_transferred: int = 0
    prompt_tokens_loaded: int = 0
    """Counts tokens from host memory, which are among the cached ones too."""
    prompt_tokens_from_disk: int = 0
    """Counts those of the loaded ones that had been on disk."""
    prompt_tokens_from_store: int = 0
    """Counts those that had come from the store."""
    num_evicted_blocks: int = 0
    prompt_tokens_pulled: int = 0
    """Counts tokens of prefixes that peers held, on a prefill node."""
    generation_tokens: int = 0
    num_steps: int = 0
    step_tokens: TokensPerStep = msgspec.field(default_factory=TokensPerStep)
    last_step_at: float = 0.0
    """The time of the last step, in CLOCK_MONOTONIC seconds."""
    worker_host_s: float = 0.0
    """Seconds that the worker's host took to start steps."""
    prefill_tokens_per_s: float = 0.0
    slack_tokens_per_s: float = 0.0
    """Prompt tokens a second that steps have room for within the objective of running answers."""
    num_dropped_messages: int = 0
    """Messages dropped on the sockets of the core and the workers' replies, because they were not
    from processes of this engine.
    """
    num_kernel_compiles: int = 0
    """Kernels that workers compiled while they served."""
    kv_transfer: dict[str, float] = {}
    images: ImageStats | None = None
    """Counts images; None where the engine encodes none."""
    grammar: GrammarStats = msgspec.field(default_factory=GrammarStats)
    drafts: DraftStats = msgspec.field(default_factory=DraftStats)
    residency: ResidencyStats | None = None
    work: WorkStats | None = None
    lora: LoRAStats | None = None
    groups: list[GroupStats] = []
    """Tells of each data-parallel group, where there are several; all else is their sum."""
    experts: ExpertStats | None = None

    @property
    def prompt_tokens_from_host(self) -> int:
        """Returns those of the loaded ones that had been in host memory."""
        behind = self.prompt_tokens_from_disk + self.prompt_tokens_from_store
        return max(0, self.prompt_tokens_loaded - behind)

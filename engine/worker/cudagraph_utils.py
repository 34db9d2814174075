"""CUDA graphs of decode steps and of short prompts: one launch instead of hundreds.

    1. `capture`    once, when all memory that steps touch has its address: for each key, largest
                    batch first, the work runs once (kernels are compiled, libraries choose their
                    algorithms) and then once more to be recorded
    2. `dispatch`   for each decode step: the smallest recorded size that holds the batch, or None;
       `dispatch_prompts` for a step with prompts
    3. `replay`

A graph reads and writes fixed addresses only; what it allocates while it runs comes from one pool
that all graphs share, because only one runs at a time. Sizes in between are padded with requests
that are none's.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from engine.batch.input_batch import BatchOrder
from engine.config import SHORT_PROMPT_TOKENS, EngineConfig
from engine.contracts.errors import CannotStartError
from engine.contracts.step_shapes import lengths_up_to
from engine.models.registry import spec_of
from engine.quantization import Fp8Scheme

logger = logging.getLogger(__name__)

PROMPT_TOKENS = (16, 32, 64, 128, 192, 256, 320, 384, SHORT_PROMPT_TOKENS)
"""Sizes of steps with short prompts. GEMMs compute 64 or 128 rows at a time, so a size that is the
next multiple of that costs little more than the prompt itself; of 448 rows the library's take
longer than of 512."""
LONG_PROMPT_TOKENS = (640, 768, 832, 896, 1024)
"""More sizes. Launched one by one, steps of these take as long at best."""
LONGEST_PROMPT_TOKENS = (1152, 1280, 1408, 1536, 1792, 2048)
"""Still more, where launches take the host longer than such steps take the GPU: in models of many
launches, where ranks share the work of each, and where quantised weights are multiplied sooner."""
MOST_PROMPT_TOKENS = (2560, 3072, 3584, 4096)
"""Larger ones, of models of many launches alone: their launches take as long as 4000 tokens do."""
FP8_PROMPT_TOKENS = (4608, 5120, 5632, 6144)
"""The largest, of such models with FP8 weights: 48 layers take the host 105 ms to launch, and the
GPU computes 6000 tokens in about 80."""
PROMPT_REQUESTS = (8, 64)
"""Requests of such a step: few or many."""
MOST_DRAFTED_PLACES = 512
"""Places of a recorded step with drafts: float32 logits of 128k tokens take 262 MB. Larger batches
launch their kernels one by one; they take the GPU so long that this costs little."""
_SMALL_SIZES = (1, 2, 4)
_STEPS = ((64, 8), (256, 16), (512, 32), (1 << 30, 64))
"""Pairs (sizes up to, distance between them)."""


class GraphCaptureError(CannotStartError):
    """A step cannot be recorded. Names it, the cause, and how to do without."""


class GraphKey(NamedTuple):
    """Names the work of one graph: a step of `num_reqs` requests with `num_tokens` tokens in all.
    `decode_query_len`: all of them decode, with this many tokens each; 0: some are prompts, or
    chunks of them. `samples`: also their next tokens and the advance of their rows; without, it
    ends with their logits. `adapters`: some of the requests may have one. `num_drafts`: the work is
    no step, but that of a drafter which guesses this many tokens of each request."""

    num_reqs: int
    num_tokens: int
    samples: bool
    decode_query_len: int = 0
    adapters: bool = False
    num_drafts: int = 0

    @classmethod
    def of_decodes(cls, num_reqs: int, decode_query_len: int, samples: bool) -> GraphKey:
        """Returns the key of a step with decodes alone."""
        return cls(num_reqs, num_reqs * decode_query_len, samples, decode_query_len)

    @classmethod
    def of_drafts(cls, num_reqs: int, num_drafts: int) -> GraphKey:
        """Returns the key of a drafter's passes."""
        return cls(num_reqs, num_reqs, samples=True, num_drafts=num_drafts)

    @property
    def decodes(self) -> bool:
        return self.decode_query_len > 0

    @property
    def width(self) -> int:
        """Returns the places at which each request chooses a token."""
        return max(self.decode_query_len, 1)

    def describe(self) -> str:
        if self.num_drafts:
            return f"{self.num_drafts} drafts of {self.num_reqs} requests"
        what = "decodes of" if self.decodes else f"{self.num_tokens} tokens of prompts of"
        adapters = " with adapters" if self.adapters else ""
        return f"a step with {what} {self.num_reqs} requests{adapters}"

    @property
    def how_to_leave_out(self) -> str:
        if self.decodes or self.num_drafts:
            return "other cudagraph_capture_sizes"
        return "prompt-graphs among disabled_fast_paths"


def recorded_prompts(config: EngineConfig) -> list[GraphKey]:
    """Returns the graphs of steps with prompts that an engine records, smallest first."""
    return prompts_to_record(config, many_launches=spec_of(config.model).has_many_launches)


def prompts_to_record(config: EngineConfig, *, many_launches: bool) -> list[GraphKey]:
    """Returns the same for a model of this kind. `many_launches`: the host is the limit for longer
    prompts."""
    device, limits = config.device, config.scheduler
    if device.enforce_eager or not device.allows("prompt-graphs"):
        return []
    if config.parallel.data_parallel_size > 1:
        return []  # Other groups may have other steps at the same time.
    has_state = any(group.is_state for group in config.kv_layout.groups)
    is_quick = config.parallel.tensor_parallel_size > 1 or config.model.quantization is not None
    if has_state:
        longest = PROMPT_TOKENS[-1]
    elif many_launches:
        longest = (FP8_PROMPT_TOKENS if _multiplies_fp8(config) else MOST_PROMPT_TOKENS)[-1]
    else:
        longest = LONGEST_PROMPT_TOKENS[-1] if is_quick else LONG_PROMPT_TOKENS[-1]
    return prompt_keys(limits.max_num_seqs, min(longest, limits.max_num_batched_tokens))


def _multiplies_fp8(config: EngineConfig) -> bool:
    quantization = config.model.quantization
    rules = () if quantization is None else quantization.rules
    return any(isinstance(rule.scheme, Fp8Scheme) for rule in rules)


def longest_prompt(keys: list[GraphKey]) -> int:
    """Returns the tokens of the largest of `keys`; 0: there are none."""
    return max((key.num_tokens for key in keys), default=0)


def prompt_keys(max_num_reqs: int, max_num_tokens: int) -> list[GraphKey]:
    """Graphs of steps with prompts, smallest first. Those that end with logits, and all long ones,
    are of as many requests as there may be: a few rows of logits more cost less than a graph."""
    sizes = sorted({min(num_reqs, max_num_reqs) for num_reqs in PROMPT_REQUESTS})
    keys: list[GraphKey] = []
    common = PROMPT_TOKENS + LONG_PROMPT_TOKENS + LONGEST_PROMPT_TOKENS
    every = common + MOST_PROMPT_TOKENS + FP8_PROMPT_TOKENS
    for num_tokens in every:
        fitting = [num_reqs for num_reqs in sizes if num_reqs < num_tokens <= max_num_tokens]
        drawing = fitting if num_tokens <= PROMPT_TOKENS[-1] else fitting[-1:]
        keys += [GraphKey(num_reqs, num_tokens, True) for num_reqs in drawing]
        keys += [GraphKey(num_reqs, num_tokens, False) for num_reqs in fitting[-1:]]
    return keys


def default_capture_sizes(max_num_reqs: int) -> tuple[int, ...]:
    """Returns sizes that are dense where requests are few and a padded one costs most of a step's
    time; rising, and always with the largest batch.
    """
    sizes = {*_SMALL_SIZES, max_num_reqs}
    size = 0
    for up_to, distance in _STEPS:
        while size + distance <= min(up_to, max_num_reqs):
            size += distance
            sizes.add(size)
    return tuple(sorted(size for size in sizes if size <= max_num_reqs))


def capture_sizes(
    config: EngineConfig, max_num_reqs: int, query_len: int | None = None
) -> tuple[int, ...]:
    """Returns the requests of decode batches that an engine records, rising: of decodes with
    `query_len` tokens; None: with as many as there may be."""
    width = config.decode_query_len if query_len is None else query_len
    most = max_num_reqs
    if width > 1:
        budget = config.scheduler.max_num_batched_tokens
        most = max(1, min(most, min(MOST_DRAFTED_PLACES, budget) // width))
    wanted = config.device.cudagraph_capture_sizes
    return tuple(sorted({size for size in wanted if size <= most})) or default_capture_sizes(most)


def shorter_sizes(config: EngineConfig, max_num_reqs: int) -> dict[int, tuple[int, ...]]:
    """Returns the same of decodes with fewer tokens, by their number, where steps differ in it."""
    if not config.is_adaptive:
        return {}
    lengths = lengths_up_to(config.decode_query_len)[:-1]
    return {length: capture_sizes(config, max_num_reqs, length) for length in lengths}


class CudaGraphManager:
    """Records and launches.

    Args:
        capture_sizes: Requests of decode batches, in any order.
        prompts: Steps with prompts, smallest first.
        decode_query_lens: Tokens of each decode; decodes of other lengths have no graphs.
        shorter: More lengths, and the requests of their batches.
        adapters: The values of `GraphKey.adapters` that there are.
        has_drafter: A drafter's passes are recorded, too, for batches of the same sizes.
    """

    def __init__(
        self,
        capture_sizes: tuple[int, ...],
        device: torch.device,
        prompts: list[GraphKey] | None = None,
        decode_query_lens: tuple[int, ...] = (1,),
        shorter: dict[int, tuple[int, ...]] | None = None,
        adapters: Sequence[bool] = (False,),
        has_drafter: bool = False,
    ) -> None:
        self._adapters = adapters
        self._has_drafter = has_drafter
        self._shorter = {length: list(sizes) for length, sizes in (shorter or {}).items()}
        self.capture_sizes = sorted(set(capture_sizes))
        self._prompts = prompts or []
        self._decode_query_lens = decode_query_lens
        self._device = device
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}

    @property
    def keys(self) -> list[GraphKey]:
        """Returns all graphs, in the order in which they are recorded."""
        of_decodes = dict.fromkeys(self._decode_query_lens, self.capture_sizes)
        keys = self._prompts[::-1] + [
            GraphKey.of_decodes(size, query_len, samples)
            for query_len, sizes in {**of_decodes, **self._shorter}.items()
            for size in reversed(sizes)
            for samples in (True, False)
        ]
        found = [key._replace(adapters=adapters) for adapters in self._adapters for key in keys]
        return found + self._draft_keys()

    def _draft_keys(self) -> list[GraphKey]:
        of_decodes = dict.fromkeys(self._decode_query_lens, self.capture_sizes)
        return [
            GraphKey.of_drafts(size, query_len - 1)
            for query_len, sizes in {**of_decodes, **self._shorter}.items()
            for size in reversed(sizes)
            if self._has_drafter and query_len > 1
        ]

    @property
    def most_places(self) -> int:
        """Returns the most places at which any graph chooses tokens."""
        return max(key.num_reqs * key.width for key in self.keys)

    def key_of(
        self,
        order: BatchOrder,
        samples: bool,
        is_recordable: Callable[[BatchOrder], bool],
        is_eager: Callable[[BatchOrder], bool],
    ) -> GraphKey | None:
        """Returns the graph of a step; None: it has none. `is_recordable` and `is_eager` are asked
        of steps with prompts."""
        num_reqs = len(order.rows)
        if order.num_decodes == num_reqs:
            return self.dispatch(num_reqs, order.decode_query_len, samples)
        if order.num_decode_tokens > order.num_decodes:
            return None  # A recorded step with prompts chooses one token for each request.
        if order.has_pending:
            return None  # To it all requests are prompts, whose states have all tokens before.
        if not is_recordable(order) or is_eager(order):
            return None
        # A chunk that leaves some of its prompt gets logits in vain, and no token.
        samples = samples and order.num_sampled == num_reqs
        return self.dispatch_prompts(num_reqs, int(order.query_lens.sum()), samples)

    def capture(self, run: Callable[[GraphKey], None], report: Callable[[float], None]) -> None:
        """Records `run(key)` for all keys. `report` is called with fractions in 0..1.

        Raises:
            GraphCaptureError: Something in `run` cannot be recorded.
            torch.OutOfMemoryError: The graphs do not fit.
        """
        keys = self.keys
        started, reserved = time.monotonic(), torch.cuda.memory_reserved(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        for index, key in enumerate(keys):
            report(index / len(keys))
            try:
                self._graphs[key] = _record(run, key, stream, pool)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                what = str(error).partition("\n")[0]
                raise GraphCaptureError(
                    f"the CUDA graph of {key.describe()} could not be recorded: {what}; start "
                    f"with enforce_eager, or with {key.how_to_leave_out}"
                ) from error
        torch.cuda.synchronize(self._device)
        report(1.0)
        logger.info(
            "recorded %d CUDA graphs, of decode batches of %s, in %.1f s; they take %.0f MiB",
            len(keys),
            ", ".join(map(str, self.capture_sizes)),
            time.monotonic() - started,
            (torch.cuda.memory_reserved(self._device) - reserved) / (1 << 20),
        )

    def dispatch(self, num_reqs: int, decode_query_len: int, samples: bool) -> GraphKey | None:
        """Returns the smallest graph that holds `num_reqs` decodes; None if no graph does."""
        sizes: Sequence[int] = self._shorter.get(decode_query_len, ())
        if decode_query_len in self._decode_query_lens:
            sizes = self.capture_sizes
        index = bisect.bisect_left(sizes, num_reqs)
        if not self._graphs or index == len(sizes):
            return None
        return GraphKey.of_decodes(sizes[index], decode_query_len, samples)

    def dispatch_drafts(self, num_reqs: int, num_drafts: int) -> GraphKey | None:
        """Returns the smallest graph in which this many requests are drafted for; None: none is."""
        step = self.dispatch(num_reqs, num_drafts + 1, samples=True)
        if step is None or not self._has_drafter:
            return None
        return GraphKey.of_drafts(step.num_reqs, num_drafts)

    def dispatch_prompts(self, num_reqs: int, num_tokens: int, samples: bool) -> GraphKey | None:
        """Returns the smallest graph that holds a step with prompts; None if no graph does."""
        fitting = (
            key
            for key in self._prompts
            if key.num_reqs >= num_reqs and key.num_tokens >= num_tokens and key.samples == samples
        )
        return next(fitting, None)

    def replay(self, key: GraphKey) -> None:
        self._graphs[key].replay()


def _record(
    run: Callable[[GraphKey], None],
    key: GraphKey,
    stream: torch.cuda.Stream,
    pool: Any,
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run(key)
        stream.synchronize()
        # Other threads, like those that watch over collectives, may go on calling CUDA.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            run(key)
        except BaseException:
            # The end of a capture that has failed fails, too, and says less.
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    return graph

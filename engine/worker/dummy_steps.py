"""Shapes of steps that nothing asked for: to measure memory, and to compile kernels ahead of time.

A step is given by the lengths of its prompts. Kernels are compiled for each power of two of the
number of prompts, for short and long ones, behind short and long contexts, and for what requests
may want of their sampling. Prompts of one token run as decodes do.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from engine.batch.row_states import RowStates
from engine.config import EngineConfig, ModelConfig
from engine.contracts.sampling_params import (
    DEFAULT_MAX_LOGPROBS,
    MAX_LOGPROBS,
    SamplingParams,
    everything,
)
from engine.contracts.scheduler_output import AdaptiveOutput, NewRequestData, SchedulerOutput
from engine.contracts.steps.step_shapes import lengths_up_to
from engine.layers.attention.backend import AttentionBackend
from engine.layers.attention.selection import TOKENS_OF_TWO_PASSES
from engine.models.recorded_steps import (
    FP8_PROMPT_TOKENS,
    PROMPT_TOKENS,
    every_prompt_tokens,
    launches_on_gpu,
)
from engine.models.registry import spec_of
from engine.sample.siblings import DRAWS_AT_ONCE
from engine.worker.attention_of_model import masked_tokens_of
from kv_transfer.layout import KVGroup, own_groups
from tandem_kernels.experts.expert_tuning import MAX_SEARCHED_PAIRS
from tandem_kernels.gemm.gemm_thresholds import gemm_thresholds
from tandem_kernels.gemm.small_m_shapes import MAX_ROWS

_SHORT_PROMPTS = (2, 16, 32, 64, MAX_ROWS + 1)
_LONG_PROMPT = 160
_MANY_TOKENS = 2048
"""The tokens from which attention has tiles that depend on the context."""
_NEVER_RECORDED = FP8_PROMPT_TOKENS[-1] + 1
"""Gives a step that a library attends, if there is one."""
_CHUNK, _CHUNK_ROWS, _CHUNK_CONTEXT = 640, 128 * 128, 16
"""Tokens of a chunk that no library takes. For steps with more query rows (a token has one for each
head of the rank) our own attention kernel has larger tiles: such chunks come with a decode."""
_LONG_CONTEXT = 4096
"""Makes that kernel's tiles larger still (`tandem_kernels.attention.prefill_tuning`)."""
_FEWEST_PROMPTS = 16
_STRIDE = 7919
"""A prime, by which tokens that shall differ are apart."""
_NUM_LOGPROBS = (0, 1, 2, 5, 10, DEFAULT_MAX_LOGPROBS)
"""One for each power of two of what a request may ask for where the operator allows no more."""
_PLAIN, _UNFILTERED = SamplingParams(temperature=1.0, top_p=0.5), SamplingParams(temperature=1.0)
_RATIO, _FEW_TOKENS = 1.25, PROMPT_TOKENS[2]
"""Sizes are as near to each other as the rows of a measured table of tiles; so are those of graphs:
of decodes, and from this many tokens on of prompts."""
_SMALL_BATCHES = (1, 2, 4, 8)
"""Kernels of few rows are compiled for each of these."""
_FEW_LOGITS = (*_SMALL_BATCHES[1:], 16, MAX_ROWS)
"""Tokens of prompts whose log probabilities are asked for: kernels of few rows compute logits of
all, and no layer is cut to one row."""


def step_without_rows(states: RowStates) -> SchedulerOutput:
    """Returns the step that computes nothing and ends all requests there are."""
    return SchedulerOutput(step_id=-1, finished_rows=np.flatnonzero(states.is_live_np).tolist())


class DummyStep(NamedTuple):
    """A step by the lengths of its prompts. `num_cached` tokens before each have KV already. The
    first prompt has answers with `sibling_seeds` as well."""

    lengths: list[int]
    sampling: SamplingParams
    num_cached: int = 0
    sibling_seeds: tuple[int, ...] = ()
    is_varied: bool = False
    """Its tokens differ, as those of texts do: experts get about as many of them each."""

    def messages(self, config: EngineConfig, num_blocks: int) -> list[SchedulerOutput]:
        """Returns the step's message, those of steps with drafts behind it, one for each number of
        tokens that decodes may have, and the one that ends its requests. All blocks are block 0,
        and those of states block 1, if the cache has one.
        """
        groups = own_groups(config.kv_layout.groups)
        # Attention must not read a state: as keys and values its bytes may be no numbers at all.
        of_states = min(1, num_blocks - 1)
        whole = [self.num_cached + length for length in self.lengths]
        lengths = decode_lengths(config)
        step = AdaptiveOutput(
            step_id=0,
            num_drafts=lengths[0] - 1 if config.is_adaptive else None,
            new_reqs=[
                self._request(row, groups[0], length, config.model.vocab_size)
                for row, length in enumerate(whole)
            ],
            new_block_ids=[
                (
                    row * len(groups) + index,
                    [of_states * group.is_state] * group.num_blocks_for(length),
                )
                for row, length in enumerate(whole)
                for index, group in list(enumerate(groups))[1:]
            ],
            prefill_chunks=list(enumerate(self.lengths)),
            block_copies=[(0, 0)],
        )
        rows = list(range(len(whole)))
        decoding: list[AdaptiveOutput] = []
        if (query_len := config.decode_query_len) > 1:
            most = config.scheduler.max_num_batched_tokens // query_len
            decoding = [AdaptiveOutput(step_id=0, decode_add=rows[:most])]
            for length in lengths[1:]:
                decoding[-1].num_drafts = length - 1
                decoding.append(AdaptiveOutput(step_id=0))
        return [step, *decoding, SchedulerOutput(step_id=0, finished_rows=rows)]

    def _token_ids(self, row: int, length: int, vocab_size: int) -> bytes:
        if not self.is_varied:
            return bytes(4 * length)
        places = np.arange(row * length, (row + 1) * length, dtype=np.int64)
        return (places * _STRIDE % vocab_size).astype(np.int32).tobytes()

    def _request(self, row: int, group: KVGroup, length: int, vocab_size: int) -> NewRequestData:
        return NewRequestData(
            row=row,
            epoch=0,
            prompt_len=length,
            prefill_token_ids=self._token_ids(row, length, vocab_size),
            num_computed_tokens=self.num_cached,
            block_ids=[0] * group.num_blocks_for(length),
            max_len=length,
            sampling=self.sampling,
            sibling_seeds=self.sibling_seeds if row == 0 else (),
        )


def decode_lengths(config: EngineConfig) -> tuple[int, ...]:
    """Returns the numbers of tokens that decodes may have in a step, the most last. Kernels are
    compiled for each of them, in recorded steps and in all that no graph holds: drafts are."""
    most = config.decode_query_len
    return lengths_up_to(most) if config.is_adaptive else (most,)


def dummy_lengths(num_tokens: int, max_num_reqs: int, max_model_len: int) -> list[int]:
    """Returns the lengths of a step with `num_tokens` tokens: ones first; the last take the rest,
    `max_model_len` each at most."""
    lengths = [1] * min(max_num_reqs, num_tokens)
    rest = num_tokens - len(lengths)
    for i in reversed(range(len(lengths))):
        more = min(rest, max_model_len - 1)
        lengths[i] += more
        rest -= more
    return lengths


def largest_of(
    attention: AttentionBackend, config: EngineConfig, device: torch.device, num_tokens: int
) -> list[DummyStep]:
    """Returns those of an engine: see `largest_steps`."""
    return largest_steps(
        num_tokens,
        config.scheduler.max_num_seqs,
        config.model,
        expands_contexts=attention.expands_contexts,
        masked_tokens=masked_tokens_of(config, device),
    )


def largest_steps(
    num_tokens: int,
    max_num_reqs: int,
    model: ModelConfig,
    *,
    expands_contexts: bool,
    masked_tokens: int = 0,
) -> list[DummyStep]:
    """Returns steps of which one takes as much memory as any step with `num_tokens` may: as many
    requests as there may be, one token each, and the rest of the tokens in few long prompts, which
    all want all that the sampler can do; and a step behind long contexts, behind those of which
    `masked_tokens` say that they are expanded and masked, or where layers keep states one of many
    prompts, each of which has a chunk that is not full."""
    lengths = dummy_lengths(num_tokens, max_num_reqs, model.max_model_len)
    most = min(MAX_LOGPROBS, model.vocab_size)
    seeds = tuple(range(DRAWS_AT_ONCE))
    steps = [DummyStep(lengths, everything(most, most), sibling_seeds=seeds)]
    if expands_contexts:
        steps.append(behind_contexts(num_tokens, max_num_reqs, model.max_model_len))
    if masked_tokens:
        longest = min(masked_tokens, model.max_model_len)
        steps.append(_behind_masks(num_tokens, max_num_reqs, longest))
    if any(kv.is_state for kv in model.kv_layers):
        count = max(1, min(max_num_reqs, num_tokens // 2))
        length = min(num_tokens // count, model.max_model_len)
        steps.append(DummyStep([length] * count, SamplingParams()))
    return steps


def behind_contexts(num_tokens: int, max_num_reqs: int, max_model_len: int) -> DummyStep:
    """Returns a step of at most `num_tokens` tokens in prompts whose longer half is cached."""
    length = max(1, min(num_tokens, max_model_len // 2))
    count = max(1, min(num_tokens // length, max_num_reqs))
    return DummyStep([length] * count, SamplingParams(), max_model_len - length)


def _behind_masks(num_tokens: int, max_num_reqs: int, longest: int) -> DummyStep:
    """Returns a step of prompts behind contexts of up to `longest` tokens, attended in two full
    passes if there may be as many: the second pass has kernels of its own."""
    half = max(1, longest // 2)
    count = max(-(-TOKENS_OF_TWO_PASSES // longest), num_tokens // half)
    count = max(1, min(count, max_num_reqs, num_tokens))
    length = max(1, min(num_tokens // count, half))
    return DummyStep([length] * count, _PLAIN, longest - length)


def warm_up_steps(config: EngineConfig, device: torch.device) -> list[DummyStep]:
    """Returns the steps to run on a device before anything waits for one."""
    max_num_reqs, max_model_len = config.scheduler.max_num_seqs, config.model.max_model_len
    longest = min(max_model_len, config.scheduler.max_num_batched_tokens)
    steps = [DummyStep([min(length, longest)], _PLAIN) for length in _SHORT_PROMPTS]
    for many in sorted({min(_MANY_TOKENS, longest), min(_NEVER_RECORDED, longest)}):
        steps += [DummyStep([many], _PLAIN, num_cached) for num_cached in (0, max_model_len - many)]
    budget = config.scheduler.max_num_batched_tokens
    fused = gemm_thresholds(device).fused_qkv_rows
    if budget >= fused:
        cached = min(_CHUNK_CONTEXT, max_model_len - 1)
        sizes = {(fused, 0), (fused, cached), (budget, 0)}
        for num_tokens, num_cached in sorted(sizes):
            steps += _step_of_many_tokens(num_tokens, num_cached, max_num_reqs, max_model_len)
    steps += _chunks(config, longest)
    num_prompts = _FEWEST_PROMPTS
    while num_prompts < 2 * max_num_reqs:
        count = min(num_prompts, max_num_reqs, longest // 2)
        last = min(_LONG_PROMPT, longest - 2 * (count - 1))
        steps.append(DummyStep([2] * (count - 1) + [last], _PLAIN))
        steps.append(DummyStep([1] * count, _UNFILTERED))
        num_prompts *= 2
    for count in sorted({*_SMALL_BATCHES, min(max_num_reqs, _FEWEST_PROMPTS)}):
        if count <= max_num_reqs and 2 * count <= longest:
            steps.append(DummyStep([2] * count, everything(num_logprobs=0)))
            steps.append(DummyStep([1] * count, _UNFILTERED))
    steps += _decodes_beside_a_prompt(config)
    if masked := masked_tokens_of(config, device):
        steps.append(_behind_masks(longest, max_num_reqs, min(masked, max_model_len)))
    steps += [DummyStep([num], _PLAIN) for num in _tokens_of_searched_pairs(config)]
    steps += [DummyStep([1], everything(num)) for num in _NUM_LOGPROBS[1:]]
    # All tokens pass the last norm here, where they have logits: few and many.
    for length in (*_FEW_LOGITS, _LONG_PROMPT, longest):
        steps.append(DummyStep([min(length, longest)], everything(0, prompt_logprobs=0)))
    return steps + _of_each_size(config, longest) + _behind_each_context(config, longest)


def _of_each_size(config: EngineConfig, longest: int) -> list[DummyStep]:
    """Returns steps with prompts of each size, for which experts have tiles, unless graphs are as
    near to each other. Where there are no graphs, other layers need them too, and behind long
    contexts, whose parts depend on the size."""
    most, limit = config.scheduler.max_num_seqs, config.model.max_model_len
    powers = range(int(math.log(longest, _RATIO)) + 1)
    near = {round(_RATIO**power) for power in powers}
    if recorded := launches_on_gpu(config).most_prompt_tokens:
        has_experts = spec_of(config.model).num_experts_per_token > 0
        lacking = sorted(size for size in near if size > recorded or most < size < _FEW_TOKENS)
        return [DummyStep([size], _PLAIN) for size in lacking] if has_experts else []
    sizes = sorted(near | {size for size in every_prompt_tokens() if size <= longest})
    steps = [DummyStep([size], _PLAIN) for size in sizes]
    few = [1 << power for power in range(PROMPT_TOKENS[-1].bit_length())]
    steps += [DummyStep([size], _PLAIN, limit - size) for size in few if size <= longest]
    most = min(most, longest)
    counts = sorted({*(1 << power for power in range(most.bit_length())), most})
    return steps + [DummyStep([1] * count, _PLAIN, limit - 1) for count in counts]


def _behind_each_context(config: EngineConfig, longest: int) -> list[DummyStep]:
    """Returns steps that no graph holds, behind contexts of each power of two: an indexer's choice
    has a kernel for each. Of latents these are decodes beside chunks; rows of several tokens are
    cut into parts in short steps alone."""
    spec = spec_of(config.model)
    if spec.dense_tokens is None:
        return []
    limit, most = config.model.max_model_len, launches_on_gpu(config).most_prompt_tokens
    steps = [[1], [2]]
    if most:
        steps = [[most + 1]] if spec.latent_shape is None else [[1, _CHUNK]]
        steps = steps if spec.rows_of_tokens is None else []
    powers = range(spec.dense_tokens.bit_length() - 1, limit.bit_length())
    return [
        DummyStep(lengths, _PLAIN, 1 << power)
        for lengths in steps
        for power in powers
        if sum(lengths) <= longest
        and len(lengths) <= config.scheduler.max_num_seqs
        and max(lengths) + (1 << power) <= limit
    ]


def _chunks(config: EngineConfig, longest: int) -> list[DummyStep]:
    """Returns steps of chunks behind short and behind long contexts, beside a decode."""
    fewest = min(heads.num_heads for heads in config.model.kinds_of_heads)
    heads = max(1, fewest // config.parallel.tensor_parallel_size)
    most = min(max(_CHUNK, _CHUNK_ROWS // heads + 1), longest - 1)
    steps = []
    for context in (_CHUNK_CONTEXT, _LONG_CONTEXT):
        length = min(_CHUNK, most, config.model.max_model_len - context)
        count = min(-(-most // length), (longest - 1) // length) if length > 1 else 0
        chunks = [length] * min(count, config.scheduler.max_num_seqs)
        if chunks:
            decode = [1] if config.scheduler.max_num_seqs > len(chunks) else []
            steps.append(DummyStep(decode + chunks, _PLAIN, context))
    return steps


def _decodes_beside_a_prompt(config: EngineConfig) -> list[DummyStep]:
    """Returns steps of one, two, four and more decodes beside a prompt, and of the fewest whose
    kernels do not begin early: the parts of a context depend on the number of decodes, and whether
    kernels begin early on that of their tokens. Where an indexer chooses, short contexts are
    attended as a whole, or behind a mask, in steps alone that no graph holds: beside a chunk, or of
    many prompts. Few tokens beside a chunk choose in as many parts as their contexts are long."""
    limits = config.scheduler
    longest = min(config.model.max_model_len, limits.max_num_batched_tokens)
    most = min(limits.max_num_seqs - 1, longest - _LONG_PROMPT)
    counts = {1 << power for power in range(max(0, most).bit_length())} | {max(1, most)}
    # Without drafts the prompt is no decode in any of the step's messages, with drafts it is.
    counts |= {MAX_ROWS // length + (length == 1) for length in decode_lengths(config)}
    counted = [[1] * count for count in sorted(counts) if count <= most]
    lengths = [[*decodes, _LONG_PROMPT] for decodes in counted]
    if (dense := spec_of(config.model).dense_tokens) is not None:
        lengths += [[*decodes, _CHUNK] for decodes in counted]
        for size in (dense, -(-dense // 2)):
            lengths.append(dummy_lengths(_NEVER_RECORDED, -(-_NEVER_RECORDED // size) + 1, size))
        lengths.append([1, _SHORT_PROMPTS[1], _CHUNK])
    fitting = [one for one in lengths if len(one) <= limits.max_num_seqs and sum(one) <= longest]
    steps = [DummyStep(one, _UNFILTERED) for one in fitting]
    if dense is not None and lengths[-1] in fitting:
        most = config.model.max_model_len - _CHUNK
        cached = [times * dense for times in (1, 2) if times * dense <= most]
        steps += [DummyStep(lengths[-1], _UNFILTERED, one) for one in cached]
    return steps


def _tokens_of_searched_pairs(config: EngineConfig) -> range:
    """Returns all numbers of tokens whose experts programs search among the step's pairs, or sort
    if weights are packed: kernels are compiled for the pairs, and for the tiles that one expert may
    need."""
    per_token = spec_of(config.model).num_experts_per_token
    most = MAX_SEARCHED_PAIRS // per_token if per_token else 0
    return range(1, min(most, config.scheduler.max_num_batched_tokens) + 1)


def _step_of_many_tokens(
    num_tokens: int, num_cached: int, max_num_reqs: int, max_model_len: int
) -> list[DummyStep]:
    """Returns a step whose prompts have this many tokens together, if they have room. The GEMM of
    queries, keys and values keeps keys where a library reads new ones, and behind cached tokens
    not; experts of the largest steps have tiles of their own. The profiling run has both kinds on
    some devices alone, and it does not run where the size of the cache is given."""
    most = max_model_len - num_cached
    count = -(-num_tokens // most)
    if count > max_num_reqs:
        return []
    lengths = dummy_lengths(num_tokens, count, most)
    return [DummyStep(lengths, _PLAIN, num_cached)]

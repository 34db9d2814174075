"""Counts what a pool of blocks holds, when every group of layers takes blocks from it, and refuses
one that holds too little."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from engine.config import EngineConfig
from engine.contracts.errors import CannotStartError
from host.memory import format_bytes
from kv_transfer.group_sizes import LONGEST
from kv_transfer.layout import DTYPE_BYTES, STATE_SPAN, KVGroup, own_groups

_STEPS_AHEAD = 2
"""One is computed while the next is scheduled."""


def windows_roll(groups: Sequence[KVGroup]) -> bool:
    """Returns whether a request has blocks of windows for its next steps alone: beside rows that
    stand for several tokens they would take far more than what is kept."""
    return any(group.compress_ratio > 1 for group in groups)


def hit_stride(groups: Sequence[KVGroup]) -> int:
    """Returns the tokens at whose multiples a prefix can be found: where the blocks of all groups
    end, and no window reaches further back than to the one before. Where rows of many tokens lie
    in blocks of others, all ends are near, and what windows have there takes more than the rows in
    between: then it is every eighth."""
    end = lcm(*(group.block_size for group in groups if not group.is_state))
    reach = max((group.window or 1) + group.window_align - 2 for group in groups)
    shared = [group.block_size for group in groups if group.blocks_of >= 0]
    reach = max(reach, LONGEST * min(shared, default=0))
    return end * max(1, -(-reach // end))


def blocks_at_once(group: KVGroup, num_tokens: int, step_tokens: int, stride: int) -> int:
    """Returns the most blocks of a window that a request of `num_tokens` tokens has at once, whose
    steps compute up to `step_tokens` of them each. What is left for open rows is kept at the end of
    a step, and where a prefix can be found: at multiples of `stride`."""
    size, overlap = group.block_size, (group.window or 1) - 1
    reach = overlap + group.window_align - 1
    most = min(
        group.num_blocks_for(num_tokens), -(-(reach + _STEPS_AHEAD * step_tokens) // size) + 1
    )
    if not group.is_open:
        return most
    at_end, found = -(-reach // size) + 1, -(-overlap // size) + (overlap > 0)
    return min(most, _STEPS_AHEAD * (at_end + (step_tokens // stride + 1) * found))


def blocks_besides(groups: Sequence[KVGroup], step_tokens: int) -> int:
    """Returns the blocks that each request takes whatever its length: of states, and of windows
    that roll with steps of `step_tokens`."""
    rolls, stride = windows_roll(groups), hit_stride(groups)
    return sum(
        blocks_at_once(group, STATE_SPAN, step_tokens, stride) if not group.is_state else 1
        for group in own_groups(groups)
        if group.is_state or (rolls and group.window is not None)
    )


def blocks_a_token(groups: Sequence[KVGroup]) -> float:
    """Returns the blocks that each token more takes, over all groups."""
    rolls = windows_roll(groups)
    return sum(
        1 / group.block_size
        for group in own_groups(groups)
        if not (group.is_state or (rolls and group.window is not None))
    )


def num_entries(groups: Sequence[KVGroup], num_tokens: int) -> int:
    """Returns the entries that tables of `num_tokens` tokens have, over all groups."""
    return sum(group.num_blocks_for(num_tokens) for group in own_groups(groups))


def num_blocks_for(
    groups: Sequence[KVGroup], num_tokens: int, step_tokens: int = STATE_SPAN
) -> int:
    """Returns the blocks of `num_tokens` tokens, over all groups; of windows that roll, those for
    steps of up to `step_tokens`."""
    rolls, stride = windows_roll(groups), hit_stride(groups)
    return sum(
        blocks_at_once(group, num_tokens, step_tokens, stride)
        if rolls and group.window is not None
        else group.num_blocks_for(num_tokens)
        for group in own_groups(groups)
    )


def tokens_that_fit(
    groups: Sequence[KVGroup], num_blocks: int, step_tokens: int = STATE_SPAN
) -> int:
    """Returns the most tokens whose blocks in all groups are at most `num_blocks`.

    Windows count as a whole, unless they roll: a request that comes back after a preemption needs
    the blocks of all its tokens for a moment.
    """
    if len(groups) == 1:
        return num_blocks * groups[0].block_size
    low, high = 0, num_blocks * max(group.block_size for group in groups)
    while low < high:
        middle = (low + high + 1) // 2
        if num_blocks_for(groups, middle, step_tokens) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


class KVCacheMemoryError(CannotStartError):
    """Raised when not even one sequence of the allowed length would fit. Says both numbers and the
    cure.
    """


def blocks_that_fit(config: EngineConfig, budget_bytes: int) -> int:
    """Returns the blocks that fit `budget_bytes`, but no more than all rows could ever fill."""
    wanted = config.scheduler.max_num_seqs * blocks_per_sequence(config)
    return min(wanted, budget_bytes // (config.kv_layout.block_bytes + _feature_bytes(config)))


def _feature_bytes(config: EngineConfig) -> int:
    """Returns what drafters keep beside each block."""
    draft = config.draft
    return 0 if draft is None else draft.feature_size * DTYPE_BYTES[config.model.dtype]


def blocks_per_sequence(config: EngineConfig) -> int:
    """Returns the blocks of one sequence of `max_model_len` tokens, and of its drafts."""
    num_slots = config.model.max_model_len + config.decode_query_len - 1
    step_tokens = config.scheduler.max_num_batched_tokens
    return num_blocks_for(config.kv_layout.groups, num_slots, step_tokens)


def check_one_sequence_fits(config: EngineConfig, num_blocks: int, budget: object = None) -> None:
    """Refuses fewer blocks than one sequence needs: a long request could wait forever. The number
    follows from `budget`, of which the error tells, where it was measured.

    Raises:
        KVCacheMemoryError: It does not fit.
    """
    needed = blocks_per_sequence(config)
    if num_blocks >= needed:
        return
    layout = config.kv_layout
    block_size, block_bytes = layout.groups[0].block_size, layout.block_bytes
    room = tokens_that_fit(layout.groups, num_blocks, config.scheduler.max_num_batched_tokens)
    shorter = f"lower max_model_len to at most {room} or " if room else ""
    raise KVCacheMemoryError(
        f"the KV cache has room for {room} tokens ({num_blocks} blocks of {block_size}, "
        f"{format_bytes(num_blocks * block_bytes)}), but max_model_len is "
        f"{config.model.max_model_len}, which takes {needed} blocks "
        f"({format_bytes(needed * block_bytes)}); {shorter}raise {size_setting(config)}"
        + (f"; {budget}" if budget is not None else "")
    )


def check_given_size(config: EngineConfig) -> None:
    """Refuses a cache whose size the settings name, where it is too small: before anything is
    loaded. Raises `KVCacheMemoryError`."""
    cache = config.cache
    if cache.num_blocks is not None:
        check_one_sequence_fits(config, cache.num_blocks)
    elif cache.kv_cache_memory_bytes is not None:
        check_one_sequence_fits(config, blocks_that_fit(config, cache.kv_cache_memory_bytes))


def size_setting(config: EngineConfig) -> str:
    """Returns which setting decides how large the cache is, and its value."""
    cache = config.cache
    if cache.num_blocks is not None:
        return f"num_blocks (now {cache.num_blocks})"
    if cache.kv_cache_memory_bytes is not None:
        return f"kv_cache_memory_bytes (now {cache.kv_cache_memory_bytes})"
    if config.device.device == "cuda":
        return f"gpu_memory_utilization (now {cache.gpu_memory_utilization:g})"
    return "kv_cache_memory_bytes (unset: a tenth of free memory)"

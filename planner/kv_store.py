"""Says whether a KV store pays for a workload: KV must come from there sooner than it is computed.

A store is asked for what the caches, host memory and disks of nodes lack. Bytes of KV per token
over the store's rate is the time that a token takes from there; computing it takes what a full step
of prompts takes for each of its tokens, which is the least that it can cost.
"""

from __future__ import annotations

from engine.speed.profile import SpeedProfile


def store_sentence(profile: SpeedProfile, share: float, gb_per_s: float) -> str:
    """Returns what to say; empty: nothing is known of the model's KV. `share` of the prompt tokens
    come again; `gb_per_s` is what one node gets from the store, 0: not known."""
    kv_bytes = profile.kv_bytes_per_token
    if not kv_bytes:
        return ""
    if share <= 0.0:
        return "No part of a prompt comes again in this traffic: a KV store has nothing to give."
    computed_s = min(point.seconds / (point.prompts * point.tokens) for point in profile.prefill)
    least = kv_bytes / computed_s / 1e9
    why = (
        f"a token has {kv_bytes / 1e3:.0f} kB of KV here and is computed in "
        f"{1e6 * computed_s:.1f} us"
    )
    if not gb_per_s:
        return f"A KV store would pay if it gave a node more than {least:.1f} GB/s: {why}."
    ratio = gb_per_s / least
    if ratio <= 1.0:
        return (
            f"A KV store of {gb_per_s:g} GB/s a node does not pay: {why}, so {least:.1f} GB/s is "
            "the least. Leave it out (kvStore.kind: none)."
        )
    return (
        f"A KV store of {gb_per_s:g} GB/s a node gives KV in 1/{ratio:.1f} of the time that "
        f"computing it takes ({why}), for what caches and host memory lack."
    )

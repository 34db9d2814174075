"""Holds what was measured of one node's speed: prefill (V) and decode steps (T), and where.

`tandem bench` writes it, `tandem plan` reads it. Seconds and tokens throughout; one node may have
several GPUs, and all figures are the node's.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

FORMAT = "tandem-speed-profile/1"


class ProfileError(ValueError):
    """A profile cannot be read; the message says which one, where in it, and why."""


class PrefillPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says that this many prompts of this many tokens, sent at once, all had their first token
    after `seconds`."""

    prompts: int
    tokens: int
    seconds: float


class DecodePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says how long a decode step takes with this many sequences of `context` tokens on average:
    the mean, and what 99 in 100 do not exceed (0: unknown)."""

    sequences: int
    context: float
    seconds: float
    p99_seconds: float = 0.0


class SpeedProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds one node's speed.

    Attributes:
        gpus: GPUs of the node; `gpu` is their kind.
        kv_tokens: Tokens that its KV cache has room for.
        kv_read_s: Seconds that a decode step takes longer for each token of context; 0: to be
            found from decode points of different contexts.
        kv_bytes_per_token: Of one token's KV, over all layers and ranks; 0: unknown.
        overhead_s: Seconds of a first token beyond queue and step: HTTP, tokenisation, RPC.
        note: Where the figures come from.
    """

    format: str = FORMAT
    name: str
    model: str
    gpu: str = ""
    gpus: int = 1
    date: str = ""
    note: str = ""
    machine: dict[str, Any] = {}
    versions: dict[str, str] = {}
    kv_tokens: int
    max_batched_tokens: int = 8192
    max_sequences: int = 256
    kv_read_s: float = 0.0
    kv_bytes_per_token: float = 0.0
    overhead_s: float = 0.005
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]

    def save(self, path: Path) -> None:
        path.write_bytes(self.encode())

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def load_profile(path: Path) -> SpeedProfile:
    """Reads a profile. Raises `ProfileError`."""
    try:
        return read_profile(path.read_bytes(), str(path))
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror or error}") from None


def read_profile(text: bytes, name: str) -> SpeedProfile:
    """Reads a profile from JSON. `name` is what errors call it. Raises `ProfileError`."""
    try:
        profile = msgspec.json.decode(text, type=SpeedProfile)
    except msgspec.DecodeError as error:
        raise ProfileError(
            f"{name}: {error}; a profile is what `tandem bench` writes ({FORMAT})"
        ) from None
    if profile.format != FORMAT:
        raise ProfileError(f"{name}: its format is {profile.format!r}, and this reads {FORMAT}")
    _check(profile, name)
    return profile


def _check(profile: SpeedProfile, name: str) -> None:
    if not profile.prefill or not profile.decode:
        raise ProfileError(f"{name}: prefill and decode need at least one measured point each")
    for index, point in enumerate(profile.prefill):
        where = f"{name}: $.prefill[{index}]"
        _positive(where, prompts=point.prompts, tokens=point.tokens, seconds=point.seconds)
    for index, step in enumerate(profile.decode):
        where = f"{name}: $.decode[{index}]"
        _positive(where, sequences=step.sequences, context=step.context, seconds=step.seconds)
    if not any(point.prompts == 1 for point in profile.prefill):
        raise ProfileError(f"{name}: $.prefill needs a point of one prompt alone (prompts: 1)")
    _positive(
        name,
        gpus=profile.gpus,
        kv_tokens=profile.kv_tokens,
        max_batched_tokens=profile.max_batched_tokens,
        max_sequences=profile.max_sequences,
    )
    for field in ("kv_read_s", "overhead_s"):
        value = getattr(profile, field)
        if not math.isfinite(value) or value < 0:
            raise ProfileError(f"{name}: {field} is {value}; it is in seconds, 0 or more")
    if not math.isfinite(profile.kv_bytes_per_token) or profile.kv_bytes_per_token < 0:
        found = profile.kv_bytes_per_token
        raise ProfileError(f"{name}: kv_bytes_per_token is {found}; it is in bytes, 0 or more")


def _positive(where: str, **values: float) -> None:
    for field, value in values.items():
        if not math.isfinite(value) or value <= 0:
            raise ProfileError(f"{where}: {field} is {value}, and must be more than 0")

"""Reads the file that says who may use the router: tenants, their keys, what each may use.

    [[tenants]]
    name = "acme"
    keys = ["sha256:9f86d0…", "sha256:60303a…"]     # two at most: the old one and the new one
    requests_per_s = 20                             # the rest is optional
    tokens_per_s = 50000
    priority = "interactive"                        # or "standard", "batch"
    operator = true                                 # may name the node that serves a request
    salt = "any secret"                             # tenants of one salt share cached prompts

`sha256:` is followed by the digest of the key as text: printf %s "$KEY" | sha256sum. Keys must be
random and long; a digest of such a one cannot be turned back. Without a salt a tenant has one of
its own and shares with none.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from router.errors import ConfigurationError
from router.request.tenants import Priority, Tenant

MAX_LIVE_KEYS = 2

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
_Rate = Annotated[float, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    name: _Name
    keys: list[str]
    requests_per_s: _Rate = 0.0
    tokens_per_s: _Rate = 0.0
    priority: Literal["interactive", "standard", "batch"] = "standard"
    operator: bool = False
    salt: str | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tenants: list[_Entry]


@dataclass(frozen=True, slots=True)
class Key:
    """Is one key of a tenant; `digest` is its SHA-256."""

    digest: bytes
    tenant: Tenant


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(text: str) -> list[Key]:
    """Returns the keys. Raises `ConfigurationError` naming the tenant and what is wrong; never a
    key."""
    try:
        file = msgspec.toml.decode(text, type=_File)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"the API key file cannot be read: {error}") from None
    keys = [key for entry in file.tenants for key in _keys_of(entry)]
    names = [entry.name for entry in file.tenants]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"the API key file has two tenants named {name}")
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigurationError("the API key file gives one key twice")
    return keys


def _keys_of(entry: _Entry) -> list[Key]:
    if not 1 <= len(entry.keys) <= MAX_LIVE_KEYS:
        raise ConfigurationError(
            f"tenant {entry.name} of the API key file needs one or two keys, not {len(entry.keys)}"
        )
    tenant = Tenant(
        name=entry.name,
        requests_per_s=entry.requests_per_s,
        tokens_per_s=entry.tokens_per_s,
        priority=Priority[entry.priority.upper()],
        is_operator=entry.operator,
        salt=_salt(entry),
    )
    keys = []
    for text in entry.keys:
        match = _DIGEST.fullmatch(text)
        if match is None:
            raise ConfigurationError(
                f"a key of tenant {entry.name} of the API key file is not sha256: and 64 hex "
                f"digits; write the digest of the key, never the key"
            )
        keys.append(Key(bytes.fromhex(match[1]), tenant))
    return keys


def _salt(entry: _Entry) -> bytes:
    """Returns a salt that is not what the file says, so that it can go to nodes."""
    if entry.salt == "":
        return b""
    source = f"name:{entry.name}" if entry.salt is None else f"salt:{entry.salt}"
    return hashlib.sha256(f"tandem tenant {source}".encode()).digest()[:16]

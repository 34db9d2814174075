"""The errors that can end a move of KV.

KVTransferError
├── HandshakeMismatch     the two nodes do not fit; names the field
├── PeerLost              the connection broke or the peer restarted
│   └── NotServed         the peer cannot serve the pull over this transport
├── TransferTimeout       no progress within the limit, or the lease ended
├── CorruptChunk          checksum, bounds or identity of a chunk is wrong
└── StagingFull           no staging memory within the limit
"""

from __future__ import annotations

from edge.printable import printable

KV_TRANSFER = "kv_transfer"
KV_LOST = "kv_lost"
KV_STALLED = "kv_stalled"
KV_DAMAGED = "kv_damaged"
_MAX_VALUE = 500
"""Characters of what a peer has said."""


class KVTransferError(Exception):
    """Base of all transfer failures. `retryable`: another attempt may succeed. `kind` names the
    kind of failure where its reason is read by programs. Words of peers are made printable."""

    retryable = True
    kind = KV_TRANSFER

    def __init__(self, reason: str = "") -> None:
        super().__init__(printable(reason))


class HandshakeMismatch(KVTransferError):
    """The peers differ in `field`; a retry with the same peer cannot help."""

    retryable = False

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(
            f"KV layouts differ in {field}: this node has {repr(ours)[:_MAX_VALUE]}, "
            f"the peer has {repr(theirs)[:_MAX_VALUE]}; "
            f"start both tiers with the same model, dtypes, scales and tandem version"
        )
        self.field = field
        self.ours = ours
        self.theirs = theirs


class PeerLost(KVTransferError):
    """The connection broke, or the peer is not the process of the handshake."""

    kind = KV_LOST


class NotServed(PeerLost):
    """The peer does not serve this pull over the transport that was asked for."""


class TransferTimeout(KVTransferError):
    """No progress within the limit."""

    kind = KV_STALLED


class CorruptChunk(KVTransferError):
    """A chunk whose checksum, bounds or identity is wrong. It was not used."""

    kind = KV_DAMAGED


class StagingFull(KVTransferError):
    """No staging memory became free within the limit."""

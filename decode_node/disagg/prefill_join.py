"""The states of a request whose prompt another node computes, and the table of their changes.

                      first token                  KV
CHOOSING ──▶ PREFILLING ───────▶ HAS_TOKEN ────────────────▶ JOINED
   ▲           │  │ KV            │  │ the call is lost        ▲ ▲
   └── fails ──┘  ▼               │  └────▶ LOST_CALL ── KV ───┘ │
               HAS_KV ── token ───┼─────────────────────────────┘
                  └── fails ──▶ KV_ONLY
                                  ▼ fails
                           CHOOSING_AGAIN ──▶ PREFILLING_AGAIN ── KV ──▶ JOINED

CHOOSING           no prefill node works for the request: before the first attempt, and after
                   one that failed
PREFILLING         a node was called
HAS_TOKEN          the KV is on its way
LOST_CALL          the call failed behind the first token: the KV may still come, so it gets a
                   little longer
HAS_KV             all KV is here, and the token is not
KV_ONLY            no token will come. No other node is needed: the engine has only the
                   prompt's last token to compute again, and samples token one itself
JOINED             the engine goes on from here
ANSWERED           the first token ended the answer, whatever the KV does
..._AGAIN          the first token is known from an earlier attempt; the client has it, and
                   every attempt would sample the same one
"""

from __future__ import annotations

from enum import Enum, auto


class JoinState(Enum):
    CHOOSING = auto()
    PREFILLING = auto()
    HAS_TOKEN = auto()
    LOST_CALL = auto()
    HAS_KV = auto()
    CHOOSING_AGAIN = auto()
    PREFILLING_AGAIN = auto()
    KV_ONLY = auto()
    JOINED = auto()
    ANSWERED = auto()

    @property
    def is_over(self) -> bool:
        """Returns whether nothing more is expected of prefill nodes."""
        return not _TABLE[self]

    @property
    def is_waiting(self) -> bool:
        """Returns whether an attempt is under way."""
        return _In.TOO_SLOW in _TABLE[self]

    @property
    def knows_token(self) -> bool:
        return self in (_S.CHOOSING_AGAIN, _S.PREFILLING_AGAIN, _S.HAS_TOKEN, _S.LOST_CALL)

    @property
    def lacks(self) -> str:
        """Says what an attempt waits for, for the log."""
        return "first token" if self in (_S.PREFILLING, _S.HAS_KV) else "KV after the first token"


class JoinInput(Enum):
    CALLED = auto()
    TOKEN = auto()
    LAST_TOKEN = auto()
    KV = auto()
    CALL_FAILED = auto()
    KV_FAILED = auto()
    TOO_SLOW = auto()


_S, _In = JoinState, JoinInput


def _failures(following: JoinState) -> dict[JoinInput, JoinState]:
    return dict.fromkeys((_In.CALL_FAILED, _In.KV_FAILED, _In.TOO_SLOW), following)


_TOKEN_CAME = {_In.TOKEN: _S.HAS_TOKEN, _In.LAST_TOKEN: _S.ANSWERED}
_TABLE: dict[JoinState, dict[JoinInput, JoinState]] = {
    _S.CHOOSING: {_In.CALLED: _S.PREFILLING},
    _S.PREFILLING: {**_failures(_S.CHOOSING), **_TOKEN_CAME, _In.KV: _S.HAS_KV},
    _S.HAS_TOKEN: {
        **_failures(_S.CHOOSING_AGAIN),
        _In.CALL_FAILED: _S.LOST_CALL,
        _In.TOKEN: _S.HAS_TOKEN,
        _In.KV: _S.JOINED,
    },
    _S.LOST_CALL: {**_failures(_S.CHOOSING_AGAIN), _In.KV: _S.JOINED},
    _S.HAS_KV: {
        **_failures(_S.KV_ONLY),
        _In.TOKEN: _S.JOINED,
        _In.LAST_TOKEN: _S.ANSWERED,
    },
    _S.CHOOSING_AGAIN: {_In.CALLED: _S.PREFILLING_AGAIN},
    _S.PREFILLING_AGAIN: {
        **_failures(_S.CHOOSING_AGAIN),
        _In.TOKEN: _S.HAS_TOKEN,
        _In.KV: _S.JOINED,
    },
    _S.KV_ONLY: {},
    _S.JOINED: {},
    _S.ANSWERED: {},
}


def following(state: JoinState, came: JoinInput) -> JoinState:
    """Returns the state that follows. Raises ValueError for what cannot come in `state`."""
    try:
        return _TABLE[state][came]
    except KeyError:
        raise ValueError(f"{came.name} cannot come in {state.name}") from None

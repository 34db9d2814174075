"""Reads what a decode node says about the prefill of a request, in the head of its answer.

x-tandem-prefill-node: 10.0.0.7:5001                                (`local`: itself)
x-tandem-prefill-work: prompt=1234;cached=1024;queue=0.012;compute=0.031
x-tandem-prefill-failed: 10.0.0.5:5001=resource_exhausted,10.0.0.6:5001=unreachable
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from edge.http import headers as names

_NODE = names.PREFILL_NODE.encode()
_WORK = names.PREFILL_WORK.encode()
_FAILED = names.PREFILL_FAILED.encode()

_LOCAL = "local"
_MOST_TOKENS = 1e9
_LEAST_S = 1e-5
_MOST_S = 1e6
"""Nothing that a node does takes less or more. One number beyond would outweigh all that is ever
learned from others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOutcome:
    """Holds it. What a header lacks or spoils is left at its default.

    Attributes:
        node: `host:port` of the prefill node that computed the prompt; empty when the decode node
            did, or nothing says.
        num_prompt_tokens: 0 when unknown, and then the rest of the work is unknown too.
        num_cached_tokens: Those that `node` had in its prefix cache.
        queue_s, compute_s: Seconds on `node`, before and from the first step to the first token.
        failures: (host:port, code) of prefill nodes that did not do it, in order.
    """

    node: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    compute_s: float = 0.0
    failures: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_headers(cls, headers: Iterable[tuple[bytes, bytes]]) -> Self:
        """Reads `headers`, which have lower-case names."""
        given = {name: value.decode("latin-1") for name, value in headers}
        node = given.get(_NODE, "")
        work = dict(_pairs(given.get(_WORK, ""), ";"))
        prompt = int(_number(work, "prompt", 1, _MOST_TOKENS))
        return cls(
            node="" if node == _LOCAL else node,
            num_prompt_tokens=prompt,
            num_cached_tokens=min(int(_number(work, "cached", 1, _MOST_TOKENS)), prompt),
            queue_s=_number(work, "queue", _LEAST_S, _MOST_S),
            compute_s=_number(work, "compute", _LEAST_S, _MOST_S),
            failures=tuple(_pairs(given.get(_FAILED, ""), ",")),
        )

    @property
    def num_computed_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_cached_tokens


def _pairs(text: str, separator: str) -> Iterable[tuple[str, str]]:
    for item in text.split(separator):
        name, equals, value = item.strip().rpartition("=")
        if equals:
            yield name, value


def _number(fields: dict[str, str], name: str, least: float, most: float) -> float:
    """Returns 0 for what is absent, no number or out of bounds."""
    try:
        value = float(fields.get(name, ""))
    except ValueError:
        return 0.0
    return value if least <= value <= most else 0.0

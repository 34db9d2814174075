"""Is the contract between those who place requests and those who carry them out.

1. place    nodes are chosen; what the request will cost them is written into the placement, and
            the relay holds that work on the nodes while it lasts
2. observe  the first byte is here: where the prompt was really computed, and what it took
3. finished the answer is complete: how long it was
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from router.nodes.node import Node
from router.placement.prefill_outcome import PrefillOutcome
from router.request.info import RequestInfo


class PrefillChoice(StrEnum):
    """Says why the first prefill node of a placement is the first. `local`: there are some, and the
    decode node does it sooner by itself; `none`: there is none; `forced`: an operator named it."""

    HOME = "home"
    SPILL = "spill"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"
    LOCAL = "local"
    NONE = "none"
    FORCED = "forced"


@dataclass(frozen=True, slots=True)
class Placement:
    """Says where a request goes.

    Attributes:
        prefills: Ranked, best first; empty when the decode node is to compute the prompt.
        num_new_tokens: Prompt tokens that the first prefill node will probably have to compute; or
            the decode node, if it is to do what prefill nodes could.
        num_kv_tokens: Tokens whose KV the decode node will probably hold at the end.
        queue_s: Estimated seconds until the prompt is begun; 0 when nothing knows.
        ttft_s: Estimated seconds to the first token; likewise.
        prefix_holder: Who probably has more of the prompt's KV than the first prefill node.
        is_idle: The request only uses what no other request does.
        others: Where its further prompts go, on the same decode node.
    """

    decode: Node
    prefills: tuple[Node, ...] = ()
    choice: PrefillChoice = PrefillChoice.NONE
    num_new_tokens: int = 0
    num_kv_tokens: int = 0
    queue_s: float = 0.0
    ttft_s: float = 0.0
    prefix_holder: Node | None = None
    is_idle: bool = False
    others: tuple[Placement, ...] = ()

    def hold_decode(self) -> AbstractContextManager[None]:
        """Counts the request as work of the decode node while this is open."""
        return self.decode.hold_request(self.num_kv_tokens, is_idle=self.is_idle)

    def hold_prefill(self) -> AbstractContextManager[object]:
        """Counts each prompt as work of the node that computes it while this is open."""
        held = ExitStack()
        for one in (self, *self.others):
            if one.num_new_tokens:
                computing = (*one.prefills, one.decode)[0]
                held.enter_context(computing.hold_tokens(one.num_new_tokens, is_idle=self.is_idle))
        return held


class Policy(Protocol):
    def place(self, request: RequestInfo, tried: Collection[Node] = ()) -> Placement:
        """Chooses nodes; `tried` decode nodes have already failed this request.

        Raises:
            NoNodeAvailable: no decode node can take it now; the message counts them by state.
            Overloaded: nodes are there, and too busy for this request.
        """

    def observe(self, request: RequestInfo, placement: Placement, outcome: PrefillOutcome) -> None:
        """Learns from a request whose first byte has arrived."""

    def finished(self, request: RequestInfo, num_tokens: int) -> None:
        """Learns from a complete answer of about `num_tokens`."""

"""A slice of the parity bench: each way, with drafts of a head with layers, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from engine.contracts.messages import EngineCoreOutput, EngineCoreRequest
from tests.drafts.draft_requests import Answers, requests_of, resumed
from tests.drafts.parity import Drafting, Limits, measure_method, run_round

SMALL = Limits(10**6, num_rounds=6, per_round=10, max_tokens=30)
WAYS = {"one node", "killed", "comes back", "P/D", "P/D, killed", "P/D, comes back"}


@pytest.mark.parametrize(("method", "target"), [("eagle3", "mamba"), ("mtp", "gated_delta")])
def test_no_bit_depends_on_drafts_on_the_wire_or_on_dying_nodes(method: str, target: str) -> None:
    found = measure_method(method, [4], SMALL, target)
    assert found["differing"] == 0
    engines = found["engines"].values()
    assert {way for one in engines for way in one["tokens"]} == WAYS
    assert all(min(one["tokens"].values()) > 50 for one in engines)
    by_wire = [one["prompt tokens from another node"] > 0 for one in engines]
    assert by_wire == [False, False, True, True]


class Liar:
    """Gives every answer one token, and it is the wrong one."""

    def __init__(self, planned: list[EngineCoreOutput]) -> None:
        self._planned = planned
        self.core = self

    is_idle = True

    def submit(self, request: EngineCoreRequest) -> None: ...

    def step(self) -> list[EngineCoreOutput]:
        return self._planned

    def check_empty(self) -> None: ...


@pytest.mark.parametrize("what", ["tokens", "ends", "logprobs", "nothing"])
def test_a_difference_is_counted(what: str) -> None:
    (request,) = requests_of(2, count=1)
    given = EngineCoreOutput(request.request_id, [5], "length", logprobs=[])
    expected = Answers()
    expected.take([given])
    told = msgspec.structs.replace(given)
    if what == "tokens":
        told.new_token_ids = [6]
    elif what == "ends":
        told.finish_reason = "stop"
    elif what == "logprobs":
        told.logprobs = ["some"]  # type: ignore[list-item]
    liar = Drafting("liar", Liar([told]), None)  # type: ignore[arg-type]
    run_round("one node", [liar], expected, seed=2, limits=replace(SMALL, per_round=1))
    assert liar.num_tokens == {"one node": 1}
    assert liar.num_differing == (what != "nothing")


def test_what_a_dead_node_left_goes_on_from_what_clients_have() -> None:
    requests = requests_of(5, count=8)
    forked = next(one for one in requests if one.choice_ids)
    found = Answers()
    first, second, third = forked.choice_ids
    found.take([EngineCoreOutput(first, [9], "stop"), EngineCoreOutput(second, [7, 8])])
    left = {one.request_id: one.spec for one in resumed([forked], found)}
    assert left == {
        second: forked.spec.of_choice(1).resumed_after([7, 8]),
        third: forked.spec.of_choice(2),
    }

"""Tests which nodes a request gets, decided without any network."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from router.errors import NoNodeAvailable
from router.nodes.address import NodeRole
from router.nodes.report import NodeReport
from router.placement.policy import PrefillChoice
from router.placement.prefill_outcome import PrefillOutcome
from router.placement.prefixes.spill import Margin
from router.placement.tandem_policy import TandemParameters, TandemPolicy
from router.request.info import RequestInfo
from router.request.prompt_parts import PromptPart
from tests.router.factories import Fleet, report, request, served

PREFILL = NodeRole.PREFILL


HALF_A_SECOND = Margin(ratio=0.0, services=4.0)
"""A service takes, before anything was served, an eighth of a second."""


def policy(fleet: Fleet, **settings: Any) -> TandemPolicy:
    parameters = TandemParameters(spill=HALF_A_SECOND)
    return TandemPolicy(fleet.registry, random.Random(1), parameters, **settings)


def draining(role: NodeRole = NodeRole.DECODE) -> NodeReport:
    return report(role, sequence=2, draining=True)


def sessions(count: int) -> list[bytes]:
    return [f"session-{i}".encode() for i in range(count)]


def with_prefills(count: int, **fields: Any) -> Fleet:
    fleet = Fleet()
    fleet.add("d")
    for i in range(count):
        fleet.add(f"p{i}", PREFILL, prefill_tokens_per_s=1000.0, **fields)
    return fleet


# Prefill ---------------------------------------------------------------------------------------


def several(*sizes: int) -> RequestInfo:
    parts = tuple(PromptPart(size, (number + 1,)) for number, size in enumerate(sizes))
    return request(
        num_prompt_tokens=sum(sizes), num_prompts=len(sizes), parts=parts, tokens_per_block=4000.0
    )


def test_each_of_several_prompts_goes_where_it_is_computed_first() -> None:
    fleet = with_prefills(2)
    placement = policy(fleet).place(several(1000, 1000, 1000, 1000))
    ways = (placement, *placement.others)
    assert {way.decode for way in ways} == {fleet.node("d")}
    assert sorted(Counter(way.prefills[0].address.target for way in ways).values()) == [2, 2]
    nodes = [fleet.node("p0"), fleet.node("p1")]
    assert [node.predicted_tokens for node in nodes] == [0, 0], "nothing is held before it is sent"
    with placement.hold_prefill():
        assert [node.predicted_tokens for node in nodes] == [2000, 2000]
    assert [node.predicted_tokens for node in nodes] == [0, 0]


def test_a_long_prompt_of_several_leaves_its_node_to_itself() -> None:
    placement = policy(with_prefills(2)).place(several(9000, 1000, 1000))
    first, *others = (way.prefills[0] for way in (placement, *placement.others))
    assert first not in others


def test_one_of_several_prompts_goes_where_its_own_beginning_is() -> None:
    fleet = with_prefills(3)
    place = policy(fleet).place
    again = several(5000, 5000, 5000)
    first = place(again)
    homes = [way.prefills[0] for way in (first, *first.others)]
    second = place(again)
    assert [way.prefills[0] for way in (second, *second.others)] == homes
    assert len(set(homes)) == 3


def test_a_session_keeps_its_prefill_node_and_sessions_spread() -> None:
    fleet = with_prefills(4)
    place = policy(fleet).place
    homes = {key: place(request(session_key=key)).prefills[0] for key in sessions(400)}
    for key, home in homes.items():
        placement = place(request(session_key=key))
        assert placement.prefills[0] is home
    assert min(Counter(id(home) for home in homes.values()).values()) > 60


def test_two_routers_agree_on_homes() -> None:
    one, two = policy(with_prefills(5)), policy(with_prefills(5))
    for key in sessions(50):
        first, second = (p.place(request(session_key=key)).prefills[0] for p in (one, two))
        assert first.address == second.address


def test_a_session_whose_home_leaves_moves_and_others_stay() -> None:
    fleet = with_prefills(4)
    place = policy(fleet).place
    before = {key: place(request(session_key=key)).prefills for key in sessions(200)}
    leaving = fleet.node("p2")
    fleet.registry.apply_report(leaving.address, draining(PREFILL))
    for key, ranked in before.items():
        now = place(request(session_key=key)).prefills[0]
        if ranked[0] is leaving:
            assert now is not leaving
        else:
            assert now is ranked[0]


def cached_turn(key: bytes, *, cached: bool) -> RequestInfo:
    """Makes a turn of 4000 tokens; what is cached of another with the same blocks, 3000."""
    blocks = (7, 8, 9) if cached else ()
    return request(
        session_key=key, num_prompt_tokens=4000, prefix_blocks=blocks, tokens_per_block=1000.0
    )


@pytest.mark.parametrize(
    ("holder_tokens", "other_tokens", "choice"),
    [
        (0, 0, PrefillChoice.HOME),
        (4200, 0, PrefillChoice.HOME),
        (4300, 0, PrefillChoice.SPILL),
        (11_600, 8000, PrefillChoice.HOME),
    ],
)
def test_a_prompt_leaves_its_prefix_only_for_a_much_shorter_queue(
    holder_tokens: int, other_tokens: int, choice: PrefillChoice
) -> None:
    """Leaving computes 3000 tokens: 3 s at the speed that nodes report, 0.375 s counted twice more
    at the one that is assumed of all, and there is a margin of 0.5 s: 4.25 s. When even the best
    queue is long, computing counts for more."""
    fleet = with_prefills(3)
    place = policy(fleet).place
    holder = place(cached_turn(b"a session", cached=True)).prefills[0]
    for node in fleet.registry.nodes(PREFILL):
        node.work.num_tokens = holder_tokens if node is holder else other_tokens
    placement = place(cached_turn(b"a session", cached=True))
    assert placement.choice is choice
    assert (placement.prefills[0] is holder) == (choice is PrefillChoice.HOME)


@pytest.mark.parametrize("idle", range(3))
def test_a_prompt_that_nobody_has_goes_to_the_idle_node(idle: int) -> None:
    """Whatever its session's home: nothing is lost by leaving that. One token of queue decides."""
    fleet = with_prefills(3)
    place = policy(fleet).place
    nodes = fleet.registry.nodes(PREFILL)
    for number, node in enumerate(nodes):
        node.work.num_tokens = 0 if number == idle else 1
    for key in (*sessions(30), b""):
        placement = place(cached_turn(key, cached=False))
        assert placement.prefills[0] is nodes[idle]
        assert placement.choice is PrefillChoice.LEAST_LOADED


def test_a_later_turn_too_short_for_the_index_follows_the_last_one() -> None:
    """Half of a block of the index is thought to be there: 0.5 s, 0.0625 s counted twice more, and
    the margin of 0.5 s are a queue of 1125 tokens."""
    fleet = with_prefills(4)
    place = policy(fleet).place
    key, turn = b"short", {"num_prompt_tokens": 1000, "tokens_per_block": 1000.0}
    home = place(request(session_key=key, **turn)).prefills[0]
    with home.hold_tokens(1000):
        last = place(request(session_key=key, **turn)).prefills[0]
    assert last is not home
    later = request(session_key=key, is_later_turn=True, **turn)
    with last.hold_tokens(1100):
        assert place(later).prefills[0] is last
    with last.hold_tokens(1150):
        assert place(later).prefills[0] is not last


def test_prompts_behind_one_opening_spread_when_their_ends_no_longer_fit() -> None:
    """The node that has the opening computes again what it was known to have. When that has cost
    as much as the opening, another node with room computes it, and both have it from then on."""
    fleet = with_prefills(2, num_total_blocks=500, block_size=16)
    placing = policy(fleet)
    turn = request(num_prompt_tokens=6000, prefix_blocks=(1, 2, 3, 4), tokens_per_block=1000.0)
    first = placing.place(turn).prefills[0]
    num_stayed = 0
    while (placement := placing.place(turn)).prefills[0] is first:
        placing.observe(turn, placement, served(first, 6000, 2000, 0.5))
        num_stayed += 1
    assert num_stayed == 2, "each wastes half of the opening"
    assert placement.choice is PrefillChoice.SPILL
    homes = {placing.place(turn).prefills[0] for _ in range(3)}
    assert len(homes) == 1, "of two that have it the session's home, or any"
    with first.hold_tokens(1000):
        assert placing.place(turn).prefills[0] is not first
    placing.observe(turn, placement, served(first, 6000, 4000, 0.2))
    assert placing.place(turn).choice is PrefillChoice.HOME, "the account began anew"


def test_the_nodes_after_home_are_ranked_by_queue() -> None:
    fleet = with_prefills(5)
    place = policy(fleet, max_prefill_candidates=4).place
    home = place(request(session_key=b"s")).prefills[0]
    others = [node for node in fleet.registry.nodes(PREFILL) if node is not home]
    for tokens, node in zip((400, 100, 300, 200), others, strict=True):
        node.work.num_tokens = tokens
    ranked = place(request(session_key=b"s")).prefills
    assert ranked == (home, others[1], others[3], others[2])


def test_a_slower_node_counts_as_fuller() -> None:
    fleet = Fleet()
    fleet.add("d")
    slow = fleet.add("slow", PREFILL, num_waiting_tokens=1000, prefill_tokens_per_s=100.0)
    fast = fleet.add("fast", PREFILL, num_waiting_tokens=5000, prefill_tokens_per_s=10000.0)
    placement = policy(fleet).place(request())
    assert placement.prefills == (fast, slow)
    assert placement.choice is PrefillChoice.LEAST_LOADED


def test_requests_without_session_spread_over_idle_nodes() -> None:
    fleet = with_prefills(4)
    place = policy(fleet).place
    firsts = Counter(place(request(request_id=f"r{i}")).prefills[0].address for i in range(400))
    assert min(firsts.values()) > 60


def test_own_work_counts_before_a_report_knows_of_it() -> None:
    fleet = with_prefills(2)
    place = policy(fleet).place
    for reports_in_between in (False, True):
        home = place(request(session_key=b"s")).prefills[0]
        with home.hold_tokens(10_000):
            assert place(request(session_key=b"s")).prefills[0] is not home
            if reports_in_between:
                fresh = report(PREFILL, sequence=2, prefill_tokens_per_s=1000.0)
                fleet.clock.now += 0.25
                fleet.registry.apply_report(home.address, fresh)
                assert place(request(session_key=b"s")).prefills[0] is not home
        assert (home.work.num_tokens, home.work.recent_tokens) == (0, 0)


def test_only_nodes_whose_kv_agrees_work_together() -> None:
    fleet = Fleet()
    for version in ("a", "b"):
        for i in range(2):
            fleet.add(f"d{version}{i}", fingerprint=version)
            fleet.add(f"p{version}{i}", PREFILL, fingerprint=version)
    place = policy(fleet).place
    for key in sessions(100):
        placement = place(request(session_key=key))
        assert placement.decode.report is not None
        wanted = placement.decode.report.fingerprint
        assert [n.report.fingerprint for n in placement.prefills if n.report] == [wanted] * 2


def test_decode_nodes_without_a_partner_serve_only_when_none_has_one() -> None:
    fleet = Fleet()
    alone = fleet.add("alone", fingerprint="new")
    paired = fleet.add("paired", fingerprint="old")
    prefill = fleet.add("p", PREFILL, fingerprint="old")
    place = policy(fleet).place
    assert {place(request()).decode for _ in range(20)} == {paired}
    fleet.registry.apply_report(prefill.address, draining(PREFILL))
    placements = [place(request()) for _ in range(50)]
    assert {placement.decode for placement in placements} == {alone, paired}
    assert {placement.choice for placement in placements} == {PrefillChoice.NONE}


# Decode ----------------------------------------------------------------------------------------


def test_the_less_loaded_of_two_random_nodes_is_taken() -> None:
    fleet = Fleet()
    for i in range(8):
        fleet.add(f"d{i}", num_running_requests=i)
    place = policy(fleet).place
    counts = Counter(place(request()).decode.address.target for _ in range(2000))
    assert counts["d7:80"] == 0
    assert counts["d0:80"] > counts["d3:80"] > counts["d6:80"] > 0


def test_a_burst_between_two_reports_is_shared_evenly() -> None:
    fleet = Fleet()
    nodes = [fleet.add(f"d{i}") for i in range(4)]
    place = policy(fleet).place
    for _ in range(400):
        place(request()).decode.work.recent_requests += 1
    counts = [node.work.recent_requests for node in nodes]
    assert sum(counts) == 400
    assert max(counts) - min(counts) <= 6


def test_tried_nodes_are_not_chosen_again() -> None:
    fleet = Fleet()
    nodes = [fleet.add(f"d{i}") for i in range(3)]
    place = policy(fleet).place
    assert {place(request(), nodes[:2]).decode for _ in range(10)} == {nodes[2]}
    with pytest.raises(NoNodeAvailable):
        place(request(), nodes)


def test_the_error_says_what_the_nodes_are_doing() -> None:
    fleet = Fleet()
    with pytest.raises(NoNodeAvailable, match="No decode node is known"):
        policy(fleet).place(request())
    fleet.add("a", draining=True)
    fleet.add("b")
    fleet.clock.now += 60
    fleet.registry.apply_report(fleet.node("a").address, draining())
    with pytest.raises(NoNodeAvailable, match="2 known: 1 draining, 1 down"):
        policy(fleet).place(request())


def test_why_a_model_has_no_node_counts_its_own_nodes() -> None:
    fleet = Fleet()
    fleet.add("a", model_name="here")
    fleet.add("b", model_name="away", draining=True)
    place = policy(fleet).place
    with pytest.raises(NoNodeAvailable, match=r"of 'nowhere' .*\(none known\)"):
        place(request(model="nowhere"))
    with pytest.raises(NoNodeAvailable, match=r"of 'away' .*\(1 known: 1 draining\)"):
        place(request(model="away"))
    assert place(request(model="here")).decode is fleet.node("a")


def test_a_model_is_found_by_each_of_its_names() -> None:
    fleet = Fleet()
    fleet.add("a", model_name="here", model_aliases=("gpt-4o", "also"))
    place = policy(fleet).place
    for name in ("", "here", "gpt-4o", "also"):
        assert place(request(model=name)).decode is fleet.node("a")


# Filters ---------------------------------------------------------------------------------------


def test_suspect_nodes_are_used_only_when_none_is_ready() -> None:
    fleet = Fleet()
    late, fresh = fleet.add("late"), fleet.add("fresh")
    fleet.clock.now += 4
    fleet.registry.apply_report(fresh.address, report(sequence=2))
    assert fleet.registry.usable(NodeRole.DECODE) == [fresh]
    fleet.registry.mark_disconnected(fresh.address)
    assert fleet.registry.usable(NodeRole.DECODE) == [late, fresh]
    fleet.clock.now += 7
    assert fleet.registry.usable(NodeRole.DECODE) == [fresh]


@pytest.mark.parametrize("seconds", ["1e-200", "1e200", "1e-9", "inf", "nan", "-1"])
@pytest.mark.parametrize("tokens", ["100", "1e300", "0.1"])
def test_what_cannot_be_of_a_prompt_teaches_nothing(seconds: str, tokens: str) -> None:
    """A decode node repeats what a prefill node says, which may be broken."""
    fleet = with_prefills(2)
    placing = policy(fleet)
    placement = placing.place(request(num_prompt_tokens=100))
    fit = placing.knowledge(placement.prefills[0]).fit
    before = fit.time
    work = f"prompt={tokens};queue={seconds};compute={seconds}".encode()
    node = placement.prefills[0].address.target.encode()
    outcome = PrefillOutcome.from_headers(
        [(b"x-tandem-prefill-node", node), (b"x-tandem-prefill-work", work)]
    )
    placing.observe(request(num_prompt_tokens=100), placement, outcome)
    assert fit.time == before
    assert outcome.queue_s == 0.0

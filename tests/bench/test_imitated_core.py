"""Tests what an imitated engine does when, stepped by hand."""

from __future__ import annotations

import pytest

from bench.serving.clusters.imitated_core import MODULE, STEP_S, ImitatedCore, Imitation
from cli.local_cluster.supervisor import ServiceSpec
from engine.contracts.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreRequest,
    PrefillLocally,
    SupplyFirstToken,
)
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from kv_transfer.metadata import KVTransferParams


def request(name: str, max_tokens: int = 3, **params: bool) -> EngineCoreRequest:
    spec = RequestSpec([1] * 100, SamplingParams(max_tokens=max_tokens))
    transfer = KVTransferParams(transfer_id="0" * 32, **params) if params else None
    return EngineCoreRequest(
        request_id=name, spec=spec, arrival_time=10.0, kv_transfer_params=transfer
    )


@pytest.fixture
def core() -> ImitatedCore:
    """Takes 10 ms for a step, and 50 ms for a prompt of 100 tokens."""
    return ImitatedCore(0.01, 2000.0)


def outputs(core: ImitatedCore, now: float) -> list[EngineCoreOutput]:
    return core.step(now).outputs


def test_steps_end_at_fixed_times_however_late_they_are_looked_at(core: ImitatedCore) -> None:
    core.handle(request("a", do_remote_prefill=True), 10.0)
    assert core.step(10.0).outputs == [] and core.ends_at is None
    core.handle(SupplyFirstToken("a", 5), 10.0)
    began = core.step(10.0)
    assert [(one.request_id, one.ok) for one in began.kv_results] == [("a", True)]
    assert core.ends_at == pytest.approx(10.01)
    [second] = outputs(core, 10.014)
    assert (second.request_id, second.finish_reason, second.num_output_tokens_before) == (
        "a",
        "",
        1,
    )
    assert core.ends_at == pytest.approx(10.02)
    [third] = outputs(core, 10.021)
    assert third.finish_reason == "length"
    assert core.ends_at is None


def test_who_comes_in_the_midst_of_a_step_joins_the_next(core: ImitatedCore) -> None:
    for name, at in (("a", 10.0), ("b", 10.004)):
        core.handle(request(name, 9, do_remote_prefill=True), at)
        core.handle(SupplyFirstToken(name, 5), at)
        core.step(at)
    assert [one.request_id for one in outputs(core, 10.011)] == ["a"]
    assert [one.request_id for one in outputs(core, 10.021)] == ["a", "b"]
    core.handle(AbortRequests(["a"]), 10.022)
    assert [one.request_id for one in outputs(core, 10.031)] == ["b"]


def test_prompts_for_a_peer_are_computed_one_after_the_other(core: ImitatedCore) -> None:
    for name in ("a", "b"):
        core.handle(request(name, 1, do_remote_decode=True), 10.0)
    core.step(10.0)
    assert core.stats(10.0).num_waiting_tokens == 100
    done = core.step(10.051)
    [first] = done.outputs
    assert (first.request_id, first.finish_reason, first.queue_s) == ("a", "length", 0.0)
    assert [one.ok for one in done.kv_results] == [True]
    [second] = outputs(core, 10.11)
    assert second.request_id == "b" and second.queue_s == pytest.approx(0.05)


def test_a_prompt_that_no_peer_computes_runs_on_here(core: ImitatedCore) -> None:
    core.handle(request("a", do_remote_prefill=True), 10.0)
    core.handle(PrefillLocally("a"), 10.0)
    core.step(10.0)
    [first] = outputs(core, 10.051)
    assert (first.num_cached_tokens, first.finish_reason) == (0, "")
    assert len(outputs(core, 10.061)) == 1


def test_nodes_are_imitated_and_routers_are_not() -> None:
    speed = Imitation(0.005, 45_000.0)
    node = speed.of_node(ServiceSpec("decode-0", ("py", "-m", "decode_node", "--port", "1"), ""))
    assert node.argv == ("py", "-m", "edge.program", MODULE, "decode_node", "--port", "1")
    assert node.env[STEP_S] == "0.005"
    router = ServiceSpec("router", ("py", "-m", "router"), "")
    assert speed.of_node(router) is router

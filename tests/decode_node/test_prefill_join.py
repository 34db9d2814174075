"""Token and KV of another node's prefill, stepped by hand: each order, each loss."""

from __future__ import annotations

from functools import reduce

import pytest

from decode_node.disagg.kv_paths import KVPaths
from decode_node.disagg.prefill_events import FirstToken, KVTaken, PrefillError
from decode_node.disagg.prefill_join import JoinInput, JoinState, following
from decode_node.disagg.prompt_kv import LocalSpeed, PromptKV
from decode_node.disagg.remote_prefill import RemotePrefill, RemotePrefillLimits
from decode_node.observe.timeline import PrefillRecord
from engine.contracts.messages import KVTransferResult
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.frontend.input_processor import GenerationRequest
from engine.frontend.request_stream import RequestStream
from tests.decode_node.decode_fakes import FakeEngine, FakePrefillNodes

TOKEN = FirstToken(7, None, 3, 0.01, 0.02)
LOST = PrefillError("unreachable", "the test said so")

INPUTS = {
    "call": JoinInput.CALLED,
    "token": JoinInput.TOKEN,
    "last": JoinInput.LAST_TOKEN,
    "kv": JoinInput.KV,
    "lost": JoinInput.CALL_FAILED,
    "no-kv": JoinInput.KV_FAILED,
    "slow": JoinInput.TOO_SLOW,
}


@pytest.mark.parametrize(
    ("inputs", "end"),
    [
        ("call token kv", JoinState.JOINED),
        ("call kv token", JoinState.JOINED),
        ("call last", JoinState.ANSWERED),
        ("call kv last", JoinState.ANSWERED),
        ("call token lost kv", JoinState.JOINED),
        ("call token token kv", JoinState.JOINED),
        ("call lost", JoinState.CHOOSING),
        ("call slow call kv token", JoinState.JOINED),
        ("call kv lost", JoinState.KV_ONLY),
        ("call kv slow", JoinState.KV_ONLY),
        ("call token lost slow", JoinState.CHOOSING_AGAIN),
        ("call token no-kv call lost", JoinState.CHOOSING_AGAIN),
        ("call token no-kv call kv", JoinState.JOINED),
        ("call token no-kv call token lost kv", JoinState.JOINED),
    ],
)
def test_ways_to_go(inputs: str, end: JoinState) -> None:
    came = (INPUTS[name] for name in inputs.split())
    assert reduce(following, came, JoinState.CHOOSING) is end


@pytest.mark.parametrize("inputs", ["token", "call call", "call kv kv", "call token kv slow"])
def test_what_cannot_come(inputs: str) -> None:
    *before, last = (INPUTS[name] for name in inputs.split())
    state = reduce(following, before, JoinState.CHOOSING)
    with pytest.raises(ValueError, match=f"{last.name} cannot come in {state.name}"):
        following(state, last)


async def chosen(engine: FakeEngine) -> tuple[RemotePrefill, RequestStream]:
    """Returns one that has called its first node, and its request's outputs; dropping them aborts
    it.
    """
    request = GenerationRequest(
        "r", RequestSpec([5, 6, 7], SamplingParams(max_tokens=4)), eos_token_ids=(0,)
    )
    nodes, limits = FakePrefillNodes(), RemotePrefillLimits(max_attempts=2)
    record = PrefillRecord()
    kv = PromptKV(KVPaths(), LocalSpeed(), "0" * 32, 4096, 3, 0.0, 2.0)
    remote = RemotePrefill(engine, nodes, request, ["a:1", "b:1"], "0" * 32, limits, record, kv)
    request.kv_transfer_params = await remote.choose()
    return remote, engine.generate(request)


async def test_the_engine_gets_one_first_token_and_hears_that_each_attempt_has_computed() -> None:
    engine = FakeEngine()
    remote, _outputs = await chosen(engine)
    remote.handle_event(TOKEN)
    with pytest.raises(PrefillError, match="gone"):
        remote.handle_event(KVTransferResult("r", 0, False, reason="gone"))
    assert remote.state is JoinState.CHOOSING_AGAIN
    assert await remote.choose() is not None
    remote.handle_event(TOKEN)
    remote.handle_event(KVTaken())
    assert remote.state is JoinState.HAS_TOKEN
    remote.handle_event(KVTransferResult("r", 1, True))
    assert remote.state is JoinState.JOINED
    assert engine.only.calls == [("first_token", 7), ("prompt_computed", None)]


async def test_a_lost_call_fails_the_attempt_only_before_the_token() -> None:
    (before, _), (after, _outputs) = await chosen(FakeEngine()), await chosen(FakeEngine())
    with pytest.raises(PrefillError, match="said so"):
        before.handle_event(LOST)
    assert before.state is JoinState.CHOOSING
    after.handle_event(TOKEN)
    after.handle_event(LOST)
    assert after.state is JoinState.LOST_CALL

"""The `Prefill` service, event by event, over a real connection."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from prometheus_client import generate_latest

from edge.http.event_loop import long_work
from edge.tracing.export.file import TraceFile
from edge.tracing.tracer import Tracer
from engine.config import ParallelConfig
from engine.contracts.outputs import SchedulerStats
from engine.contracts.request_spec import SPEC_VERSION, RequestSpec, encode_spec
from engine.contracts.sampling_params import SamplingParams
from kv_transfer.layout import KVLayout
from kv_transfer.metadata import KVPeer, group_of_transfer
from kv_transfer.wire.handshake import peer_from_proto, peer_to_proto
from prefill_node import service as service_module
from tandem_pb import node_pb2, prefill_pb2
from tests.engine.core.tiny_engine import MAX_LEN, VOCAB, tiny_config
from tests.prefill_node.prefill_fakes import (
    TIMEOUT_S,
    FakePrompt,
    ServedPrefill,
    served_prefill,
    until,
)

TRANSFER = "0123456789abcdef" * 2


def request(node: ServedPrefill, **fields: Any) -> prefill_pb2.PrefillRequest:
    sampling = fields.pop("sampling", SamplingParams(max_tokens=9, seed=5, min_tokens=3))
    of_spec = {name: fields.pop(name) for name in RequestSpec.__struct_fields__ if name in fields}
    tokens = of_spec.pop("prompt_token_ids", [1, 2, 3])
    return prefill_pb2.PrefillRequest(
        **{
            "request_id": "r",
            "transfer_id": TRANSFER,
            "attempt": 0,
            "expected_epoch": node.engine.config.epoch,
            "prompt_token_ids": tokens,
            "spec": encode_spec(RequestSpec(tokens, sampling, **of_spec)),
            **fields,
        }
    )


async def read(call: Any) -> Any:
    async with asyncio.timeout(TIMEOUT_S):
        return await call.read()


async def accepted(
    node: ServedPrefill, metadata: Any = None, **fields: Any
) -> tuple[Any, FakePrompt]:
    """Returns a call that was accepted, and the prompt as the engine has it."""
    call = node.stub.Prefill(request(node, **fields), metadata=metadata)
    assert (await read(call)).WhichOneof("event") == "accepted"
    return call, await node.engine.added()


async def refusal(node: ServedPrefill, **fields: Any) -> tuple[prefill_pb2.PrefillEvent, Any]:
    """Returns the `failed` event, and the status that follows."""
    call = node.stub.Prefill(request(node, **fields))
    event = await read(call)
    assert event.WhichOneof("event") == "failed"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    assert caught.value.details() == event.failed.message
    assert event.failed.code == caught.value.code().name.lower()
    assert not node.engine.prompts
    return event, caught.value


async def test_the_usual_way() -> None:
    async with served_prefill() as node:
        sampling = SamplingParams(max_tokens=9, seed=5, min_tokens=3, logprobs=1)
        call = node.stub.Prefill(request(node, attempt=2, sampling=sampling))
        accepted = await read(call)
        assert accepted.WhichOneof("event") == "accepted"
        assert accepted.load.epoch == node.engine.config.epoch
        prompt = await node.engine.added()
        params = prompt.request.kv_transfer_params
        assert params is not None and params.do_remote_decode
        assert (params.transfer_id, params.attempt) == (TRANSFER, 2)
        assert prompt.request.spec.prompt_token_ids == [1, 2, 3]
        assert prompt.request.spec.sampling.max_tokens == 1
        assert prompt.request.spec.sampling.min_tokens == 1, "the end token stays masked"
        assert prompt.request.spec.sampling.seed == 5
        assert node.status.work.num_computing == 1
        node.engine.samples(prompt)
        token = (await read(call)).first_token
        assert (token.token_id, token.num_cached_tokens, token.queue_s) == (42, 2, 0.125)
        assert list(token.logprobs.token_ids) == [42, 7]
        assert node.status.work.num_computing == 0
        assert node.servicer.open.count == 1
        node.engine.kv_is_taken(prompt)
        done = await read(call)
        assert done.done.kv_bytes == 1234
        assert done.load.sequence > accepted.load.sequence
        assert await read(call) is grpc.aio.EOF
        await until(lambda: node.servicer.open.count == 0, "the call has ended")
        assert not prompt.aborted
        assert node.outcomes() == {"done": 1}


async def test_the_engine_has_a_prompt_before_its_caller_has_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prompt waits for no message."""
    async with served_prefill() as node:
        report, had_prompt = node.status.load, list[bool]()

        def load() -> node_pb2.NodeLoad:
            had_prompt.append(bool(node.engine.prompts))
            return report()

        monkeypatch.setattr(node.status, "load", load)
        call, _ = await accepted(node)
        call.cancel()
    assert had_prompt == [True]


async def test_the_node_tells_which_prompts_it_has_computed() -> None:
    async with served_prefill() as node:
        call, prompt = await accepted(node, prefix_hash=77)
        assert node.status.prefixes_since(0) == ([], 0)
        node.engine.samples(prompt)
        await read(call)
        assert node.status.prefixes_since(0) == ([77], 1)
        call.cancel()


@pytest.mark.parametrize("asks", [None, 1])
async def test_first_tokens_of_further_answers_come_with_the_first(asks: int | None) -> None:
    """The prompt is one request to the engine, and its KV one export; that it is also the end of
    the first answer concerns no other."""
    async with served_prefill() as node:
        sampling = SamplingParams(max_tokens=9, seed=5, logprobs=asks)
        call, prompt = await accepted(node, sampling=sampling, sibling_seeds=(6, 2**64 - 1))
        assert prompt.request.spec.seeds == (5, 6, 2**64 - 1)
        assert prompt.request.choice_ids == ()
        node.engine.samples(prompt, finish_reason="stop")
        token = (await read(call)).first_token
        assert [token.token_id, *(one.token_id for one in token.siblings)] == [42, 43, 44]
        for sibling in token.siblings:
            assert list(sibling.logprobs.token_ids) == ([sibling.token_id, 7] if asks else [])
        assert node.servicer.open.count == 1
        node.engine.kv_is_taken(prompt)
        assert (await read(call)).done.kv_bytes == 1234
        assert await read(call) is grpc.aio.EOF
        await until(lambda: node.outcomes() == {"done": 1}, "the call has ended")


async def test_answers_that_go_on_are_asked_for_one_by_one() -> None:
    async with served_prefill() as node:
        resumed = {"prompt_token_ids": [1, 2, 3], "num_resumed_tokens": 1, "sibling_seeds": (6,)}
        event, _ = await refusal(node, **resumed)
        assert event.failed.code == "invalid_argument"
        assert "one answer at a time" in event.failed.message


async def test_no_logprobs_unless_asked_for() -> None:
    async with served_prefill() as node:
        call, prompt = await accepted(node)
        node.engine.samples(prompt)
        assert not (await read(call)).first_token.HasField("logprobs")
        call.cancel()


@pytest.mark.parametrize("moment", ["accepted", "token", "done"])
async def test_cancelling_aborts_at_any_moment(moment: str) -> None:
    async with served_prefill() as node:
        call, prompt = await accepted(node)
        if moment != "accepted":
            node.engine.samples(prompt)
            await read(call)
        if moment == "done":
            node.engine.kv_is_taken(prompt)
        call.cancel()
        await until(lambda: node.servicer.open.count == 0, "the call has ended")
        assert prompt.aborted == (moment != "done")


async def test_one_token_alone_exports_no_kv() -> None:
    async with served_prefill() as node:
        call, prompt = await accepted(node, first_token_only=True)
        assert prompt.request.kv_transfer_params is None
        node.engine.samples(prompt)
        assert (await read(call)).first_token.token_id == 42
        assert (await read(call)).done.kv_bytes == 0
        assert await read(call) is grpc.aio.EOF
        await until(lambda: node.outcomes() == {"done": 1}, "counted")


@pytest.mark.parametrize("puller_leaves_first", [True, False])
async def test_a_token_that_ends_the_answer_is_a_success(puller_leaves_first: bool) -> None:
    """The caller sees the end token too, and calls off whatever is on its way."""
    async with served_prefill() as node:
        call, prompt = await accepted(node)
        node.engine.samples(prompt, finish_reason="stop")
        await read(call)
        if puller_leaves_first:
            node.engine.kv_is_taken(prompt, ok=False)
            assert (await read(call)).WhichOneof("event") == "done"
        call.cancel()
        await until(lambda: node.outcomes() == {"done": 1}, "counted")
        assert prompt.aborted != puller_leaves_first


async def test_kv_that_nobody_takes_fails_the_call() -> None:
    async with served_prefill() as node:
        call, prompt = await accepted(node)
        node.engine.samples(prompt)
        await read(call)
        node.engine.kv_is_taken(prompt, ok=False)
        failed = (await read(call)).failed
        assert (failed.code, failed.retryable) == ("kv_transfer", True)
        assert "lease" in failed.message
        assert await read(call) is grpc.aio.EOF
        await until(lambda: node.outcomes() == {"kv_transfer": 1}, "counted")


async def test_kv_that_is_not_wanted_any_more_has_not_failed() -> None:
    async with served_prefill() as node:
        call, prompt = await accepted(node)
        node.engine.samples(prompt)
        await read(call)
        node.engine.kv_is_taken(prompt, ok=False, is_called_off=True)
        assert (await read(call)).failed.code == "given_up"
        await until(lambda: node.outcomes() == {"given_up": 1}, "counted")


async def test_a_request_that_is_at_fault_itself_need_not_be_tried_elsewhere() -> None:
    async with served_prefill() as node:
        call, prompt = await accepted(node)
        node.engine.cannot_follow(prompt, "the grammar leaves no token")
        failed = (await read(call)).failed
        assert (failed.code, failed.retryable) == ("cannot_follow", False)
        assert failed.message == "the grammar leaves no token"
        await until(lambda: node.outcomes() == {"cannot_follow": 1}, "counted")


@pytest.mark.parametrize("has_token", [True, False])
async def test_an_engine_that_dies_fails_open_calls(has_token: bool) -> None:
    async with served_prefill() as node:
        call, prompt = await accepted(node)
        if has_token:
            node.engine.samples(prompt)
            await read(call)
        node.engine.die()
        failed = (await read(call)).failed
        assert (failed.code, failed.retryable) == ("engine_dead", True)
        assert await read(call) is grpc.aio.EOF
        node.engine.prompts.clear()
        _, error = await refusal(node)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "SIGKILL" in error.details()


# Refused at once -------------------------------------------------------------------------------


async def test_an_attempt_that_is_open_is_not_begun_again() -> None:
    """A second call does not end the first one; its caller names a new attempt to try again."""
    async with served_prefill() as node:
        call, prompt = await accepted(node)
        again = node.stub.Prefill(request(node))
        failed = (await read(again)).failed
        assert failed.code == "invalid_argument" and failed.retryable
        assert "attempt 0 of this transfer is open here already" in failed.message
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(again)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        newer = node.stub.Prefill(request(node, attempt=1))
        assert (await read(newer)).WhichOneof("event") == "accepted"
        await node.engine.added(2)
        node.engine.samples(prompt)
        assert (await read(call)).first_token.token_id == 42
        node.engine.kv_is_taken(prompt)
        assert (await read(call)).done.kv_bytes == 1234
        assert not prompt.aborted
        newer.cancel()


async def test_another_epoch_means_the_handshake_was_with_another_process() -> None:
    async with served_prefill() as node:
        _, error = await refusal(node, expected_epoch=node.engine.config.epoch ^ 1)
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_stopping_node_refuses_and_says_so_in_its_load() -> None:
    async with served_prefill() as node:
        node.status.work.draining = True
        event, error = await refusal(node)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert event.load.draining


@pytest.mark.parametrize("stops", [False, True])
async def test_a_long_prompt_is_read_beside_the_event_loop(
    stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go ahead meanwhile, and a node that stops in between takes it no more."""
    monkeypatch.setattr(service_module, "MOST_TOGETHER", 3)
    goes_on = threading.Event()
    async with served_prefill() as node:
        busy = asyncio.create_task(long_work.run(True, goes_on.wait))
        long = node.stub.Prefill(request(node, prompt_token_ids=[5, 6, 7, 8]))
        reads = asyncio.create_task(read(long))
        try:
            call, prompt = await accepted(node, attempt=1)
            assert prompt.request.spec.prompt_token_ids == [1, 2, 3]
            assert not reads.done()
            node.status.work.draining = stops
        finally:
            goes_on.set()
        await busy
        event = await reads
        if stops:
            assert event.failed.code == "unavailable" and len(node.engine.prompts) == 1
        else:
            assert event.WhichOneof("event") == "accepted"
            prompt = await node.engine.added(2)
            assert prompt.request.spec.prompt_token_ids == [5, 6, 7, 8]
        call.cancel()
        long.cancel()


@pytest.mark.parametrize("limit", ["requests", "tokens"])
async def test_a_long_queue_refuses_with_fresh_load(limit: str) -> None:
    limits = {"max_waiting_requests": 0} if limit == "requests" else {"max_waiting_tokens": 500}
    async with served_prefill(**limits) as node:
        node.engine.stats = SchedulerStats(
            num_waiting=3, num_waiting_tokens=500, num_total_blocks=9
        )
        event, error = await refusal(node)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (event.load.num_waiting_requests, event.load.num_waiting_tokens) == (3, 500)
        assert event.failed.retryable
        assert node.outcomes() == {"resource_exhausted": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": []},
        {"prompt_token_ids": [VOCAB]},
        {"prompt_token_ids": [1] * MAX_LEN},
        {"transfer_id": ""},
        {"transfer_id": "../" * 10},
        {"transfer_id": TRANSFER.upper()},
        {"sampling": SamplingParams(temperature=float("nan"))},
        {"sampling": SamplingParams(top_p=0.0)},
        {"sampling": SamplingParams(logit_bias={VOCAB: 1.0})},
        {"sampling": SamplingParams(min_tokens=17)},
        {"num_resumed_tokens": 3},
        {"num_resumed_tokens": -1},
        {"priority": 1 << 31},
        {"prefix_hash": -1},
        {"cache_salt": "x" * 4097},
        {"spec": bytes((SPEC_VERSION,)) + b"\xc1"},
        {"spec": bytes((SPEC_VERSION,))},
    ],
)
async def test_wrong_requests(fields: dict[str, Any]) -> None:
    async with served_prefill() as node:
        _, error = await refusal(node, **fields)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("version", [0, SPEC_VERSION + 1, 255])
async def test_the_spec_of_another_release_is_refused_by_name(version: int) -> None:
    async with served_prefill() as node:
        spec = bytes((version,)) + encode_spec(RequestSpec([1, 2, 3]))[1:]
        _, error = await refusal(node, spec=spec)
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert f"request spec version {version} " in error.details()


async def test_stopping_in_the_end_fails_what_is_open() -> None:
    async with served_prefill() as node:
        call, _ = await accepted(node)
        node.servicer.abort_all()
        assert (await read(call)).WhichOneof("event") == "failed"
        assert await read(call) is grpc.aio.EOF


# Handshake -------------------------------------------------------------------------------------


def decode_peer(**layout: Any) -> KVPeer:
    config = tiny_config()
    of_layout = {name: layout[name] for name in layout if name in KVLayout.__struct_fields__}
    of_group = {name: layout[name] for name in layout if name not in of_layout}
    (group,) = config.kv_layout.groups
    group = msgspec.structs.replace(group, **of_group)
    changed = msgspec.structs.replace(config.kv_layout, groups=(group,), **of_layout)
    return KVPeer(engine_id="decode", epoch=1, layout=changed)


async def test_the_handshake_gives_endpoints_and_load() -> None:
    async with served_prefill() as node:
        peer = decode_peer(block_size=64, tp_size=2)
        reply = await node.stub.Handshake(prefill_pb2.HandshakeRequest(decode=peer_to_proto(peer)))
        assert peer_from_proto(reply.prefill) == node.engine.ready.peer
        assert reply.load.node_id == node.engine.config.engine_id
        assert not reply.load.draining


@pytest.mark.parametrize(
    ("field", "value"),
    [("model_hash", "x"), ("dtype", "float16"), ("window", 7), ("protocol_version", 99)],
)
async def test_the_handshake_names_the_field_that_differs(field: str, value: object) -> None:
    async with served_prefill() as node:
        message = prefill_pb2.HandshakeRequest(decode=peer_to_proto(decode_peer(**{field: value})))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.stub.Handshake(message)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert field in caught.value.details()


async def test_resumed_output_is_sampled_behind_as_output() -> None:
    async with served_prefill() as node:
        sampling = SamplingParams(max_tokens=9, seed=5, min_tokens=3)
        tokens = [1, 2, 3, 7, 8]
        call, prompt = await accepted(
            node, prompt_token_ids=tokens, num_resumed_tokens=2, sampling=sampling
        )
        assert prompt.request.spec.prompt_token_ids == tokens
        assert prompt.request.spec.num_resumed_tokens == 2
        assert (
            prompt.request.spec.sampling.max_tokens,
            prompt.request.spec.sampling.min_tokens,
        ) == (3, 3)
        call.cancel()


async def test_the_trace_of_a_call_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "prefill_node.service")
    trace = "0af7651916cd43dd8448eb211c80319c"
    async with served_prefill() as node:
        parent = f"00-{trace}-b7ad6b7169203331-01"
        call = node.stub.Prefill(request(node), metadata=(("traceparent", parent),))
        await read(call)
        assert f"request r: trace {trace}" in caplog.text
        call.cancel()


async def test_prompts_that_failed_are_traced_as_such(tmp_path: Path) -> None:
    tracer = Tracer(TraceFile(tmp_path / "traces", {"service.name": "tandem-prefill"}))
    async with served_prefill(tracer) as node:
        await refusal(node, prompt_token_ids=[VOCAB])
        call, _ = await accepted(node, metadata=(("x-request-id", "req-7"),))
        node.servicer.abort_all()
        assert (await read(call)).WhichOneof("event") == "failed"
        assert await read(call) is grpc.aio.EOF
        call, _ = await accepted(node)
        call.cancel()
    refused, ended, left = [
        json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
        for line in (tmp_path / "traces").read_text().splitlines()
    ]
    assert refused["status"]["code"] == ended["status"]["code"] == 2
    assert refused["status"]["message"] == "invalid_argument", "and nothing of the prompt"
    assert {"key": "gen_ai.request.id", "value": {"stringValue": "req-7"}} in ended["attributes"]
    assert {"key": "error.type", "value": {"stringValue": "ended"}} in ended["attributes"]
    assert "status" not in left, "its caller left"
    tracer.close()


async def test_the_trace_of_a_prompt_has_every_layer(tmp_path: Path) -> None:
    tracer = Tracer(TraceFile(tmp_path / "traces", {"service.name": "tandem-prefill"}))
    trace = "0af7651916cd43dd8448eb211c80319c"
    async with served_prefill(tracer) as node:
        parent = f"00-{trace}-b7ad6b7169203331-01"
        call, prompt = await accepted(node, metadata=(("traceparent", parent),))
        node.engine.samples(prompt)
        await read(call)
        node.engine.kv_is_taken(prompt)
        await read(call)
        (line,) = (tmp_path / "traces").read_text().splitlines()
        spans = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
        names = ["queue", "prefill", "save layer 0", "save layer 1", "kv held"]
        assert [span["name"] for span in spans] == ["tandem.v1.Prefill/Prefill", *names]
        rpc = {"key": "rpc.method", "value": {"stringValue": "Prefill"}}
        assert rpc in spans[0]["attributes"]
        assert {span["traceId"] for span in spans} == {trace}
        assert spans[0]["parentSpanId"] == "b7ad6b7169203331", "the decode node's span"
        assert {span["parentSpanId"] for span in spans[1:]} == {spans[0]["spanId"]}
        saved = [int(s["endTimeUnixNano"]) - int(s["startTimeUnixNano"]) for s in spans[3:5]]
        assert saved == pytest.approx([5e8, 2.5e8], abs=2)
        text = generate_latest(node.metrics.registry).decode()
        assert 'tandem_kv_layer_save_seconds_count{engine="0",model_name="tiny"} 2.0' in text
    tracer.close()


# Data-parallel groups ---------------------------------------------------------------------------


@pytest.mark.parametrize("reads_group", [True, False])
async def test_the_group_of_a_prompt_is_named_before_anything_else(reads_group: bool) -> None:
    """Callers of an older release count on the group that the transfer's id means."""
    groups = ParallelConfig(data_parallel_size=2)
    async with served_prefill(parallel=groups) as node:
        call = node.stub.Prefill(request(node, reads_group=reads_group))
        prompt = await node.engine.added()
        assert prompt.request.group == (-1 if reads_group else group_of_transfer(TRANSFER, 2))
        if not reads_group:
            assert (await read(call)).WhichOneof("event") == "accepted"
        node.engine.places(prompt, 1)
        node.engine.samples(prompt)
        if reads_group:
            event = await read(call)
            assert event.WhichOneof("event") == "accepted"
            assert event.accepted.group == 1
        assert (await read(call)).first_token.token_id == 42
        node.engine.kv_is_taken(prompt)
        assert (await read(call)).WhichOneof("event") == "done"
        assert await read(call) is grpc.aio.EOF


async def test_a_prompt_that_exports_nothing_waits_for_no_name() -> None:
    async with served_prefill(parallel=ParallelConfig(data_parallel_size=2)) as node:
        call = node.stub.Prefill(request(node, reads_group=True, first_token_only=True))
        assert (await read(call)).WhichOneof("event") == "accepted"
        prompt = await node.engine.added()
        node.engine.samples(prompt)
        assert (await read(call)).WhichOneof("event") == "first_token"
        assert (await read(call)).WhichOneof("event") == "done"

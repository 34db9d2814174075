"""Real engines, their nodes' gRPC services and transfer processes: a conversation's turns are
computed on one prefill node, then on another, which gets what it lacks from the first or from the
decode node. Every token is as it is without."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import pytest_asyncio

from edge.security.config import SecurityConfig
from edge.security.credentials import Credentials
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.input_processor import GenerationRequest
from engine.node.grpc_server import NodeGrpcServer
from engine.node.prefix_client import PrefixClient
from engine.node.prefix_servicer import CALLERS, PrefixServicer
from engine.node.status import NodeStatus
from kv_transfer.metadata import KVTransferParams
from tandem_pb import node_pb2, prefixes_pb2_grpc
from tests.engine.core.pd_pair import start_engine, start_engines, tokens_of
from tests.engine.core.tiny_engine import VOCAB, until, until_empty
from tests.processes import find_processes

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 8
TRIES = range(10)
"""A node does not wait long for a peer's help, and asks it no more for a while: where either was
held up, it computes itself, and a test tries again."""


@dataclass
class Nodes:
    """Two prefill nodes, the second of two stages, and a decode node; the test plays router and
    proxy."""

    engines: dict[str, AsyncLLM]
    addresses: dict[str, str] = field(default_factory=dict)
    num_turns: int = 0
    closing: list[NodeGrpcServer | PrefixClient] = field(default_factory=list)

    async def serve(self) -> None:
        credentials = Credentials(SecurityConfig())
        for name, engine in self.engines.items():
            role = node_pb2.NODE_ROLE_DECODE if name == "decode" else node_pb2.NODE_ROLE_PREFILL
            status = NodeStatus(engine, role, 60.0)
            server = NodeGrpcServer("127.0.0.1", 0, credentials, CALLERS)
            prefixes_pb2_grpc.add_PrefixesServicer_to_server(  # type: ignore[no-untyped-call]
                PrefixServicer(engine, status), server.server
            )
            await server.start(status)
            kind = "decode" if name == "decode" else "prefill"
            self.addresses[name] = f"{kind}/127.0.0.1:{server.port}"
            self.closing.append(server)
            if name != "decode":
                client = PrefixClient(lambda llm=engine: llm.ready.peer, credentials)  # type: ignore[misc]
                engine.prefixes.ask = client.ask
                self.closing.append(client)

    async def turn(
        self, prompt: list[int], prefill: str, holder: str = "", salt: str = "", num_new: int = 12
    ) -> list[int]:
        """Returns the answer to a prompt; `holder` is named to the node that prefills it."""
        self.num_turns += 1
        name, transfer_id = f"t{self.num_turns}", f"{self.num_turns:032x}"
        spec = RequestSpec(
            prompt, SamplingParams(max_tokens=num_new, ignore_eos=True), cache_salt=salt
        )
        engine, decode = self.engines[prefill], self.engines["decode"]
        pull = GenerationRequest(name, spec)
        pull.kv_transfer_params = KVTransferParams(
            do_remote_prefill=True, transfer_id=transfer_id, peer=engine.ready.peer
        )
        export = GenerationRequest(name, spec.for_one_token())
        export.kv_transfer_params = KVTransferParams(do_remote_decode=True, transfer_id=transfer_id)
        export.prefix_holder = self.addresses.get(holder, holder)
        tokens = asyncio.create_task(tokens_of(decode.generate(pull)))
        async for output in engine.generate(export):
            for token in output.token_ids:
                decode.supply_first_token(name, token)
        assert (await engine.wait_kv_result(name)).ok
        return await tokens

    async def settle(self) -> None:
        """Waits until nobody holds anything, with caches as they are."""
        for llm in self.engines.values():
            await until(partial(_holds_nothing, llm), "nothing held")

    def count(self, name: str, counter: str) -> float:
        return self.engines[name].stats.kv_transfer.get(counter, 0.0)

    async def close(self) -> None:
        for one in self.closing:
            await (one.stop() if isinstance(one, NodeGrpcServer) else one.close())

    async def forget_all(self) -> None:
        """Forgets what is cached, of pools of any size."""
        await self.settle()
        for llm in self.engines.values():
            assert await llm.reset_prefix_cache()

    async def forget(self) -> None:
        """Forgets what is cached, and who did not answer in time."""
        for llm in self.engines.values():
            await until_empty(llm)
        for client in self.closing:
            if isinstance(client, PrefixClient):
                client._avoid_until.clear()


def _holds_nothing(llm: AsyncLLM) -> bool:
    stats = llm.stats
    is_free = stats.num_free_blocks == stats.num_total_blocks and not stats.num_running
    return is_free and not stats.kv_transfer.get("live_transfers")


def _processes_hold_nothing(llm: AsyncLLM) -> bool:
    """Returns what transfer processes told last, which is later than the scheduler knows it."""
    held = ("staged_bytes", "leases", "process_transfers", "open_pulls")
    return not any(llm.stats.kv_transfer[name] for name in held)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes() -> AsyncIterator[Nodes]:
    names = ("first", "second", "decode")
    starting = (
        start_engine(
            "decode" if name == "decode" else "prefill",
            stages=2 if name == "second" else 1,
            shares_prefixes=True,
            pulls_always=True,
        )
        for name in names
    )
    nodes = Nodes(dict(zip(names, await start_engines(*starting), strict=True)))
    try:
        await nodes.serve()
        yield nodes
        await nodes.settle()
        for llm in nodes.engines.values():
            assert not llm.is_dead, llm.dead_reason
            await until(partial(_processes_hold_nothing, llm), "processes that hold nothing")
            assert llm.stats.kv_transfer["leases_expired"] == 0, "all were given back"
    finally:
        await nodes.close()
        for llm in nodes.engines.values():
            await llm.shutdown()


def prompt_of(seed: int, length: int = 41) -> list[int]:
    return [1 + (seed * 17 + i * i) % (VOCAB - 1) for i in range(length)]


@pytest.mark.parametrize(("holder", "lacking"), [("first", "second"), ("second", "first")])
async def test_a_prefix_comes_from_another_prefill_node(
    nodes: Nodes, holder: str, lacking: str
) -> None:
    """Each stage of the one takes its layers from the other, and the other way round."""
    pulled, prompt = 0.0, prompt_of(1)
    for _ in TRIES:
        await nodes.forget()
        expected = await nodes.turn(prompt, holder)
        before = nodes.count(lacking, "prefix_pulled_tokens")
        computed = nodes.engines[lacking].stats.prompt_tokens_computed
        assert await nodes.turn(prompt, lacking, holder) == expected
        await nodes.settle()
        pulled = nodes.count(lacking, "prefix_pulled_tokens") - before
        if pulled:
            break
    assert pulled == 40
    assert nodes.engines[lacking].stats.prompt_tokens_computed - computed == 1


async def test_turns_with_and_without_what_decode_offers(nodes: Nodes) -> None:
    """Each turn's prompt has the answer before it; prefill nodes alternate, and are named who has
    more than they."""

    async def conversation(holder: str) -> tuple[list[int], int]:
        await nodes.forget()
        before = sum(nodes.engines[n].stats.prompt_tokens_computed for n in ("first", "second"))
        tokens = prompt_of(2, 20)
        for turn in range(3):
            answer = await nodes.turn(tokens, ("first", "second")[turn % 2], holder, num_new=16)
            tokens = [*tokens, *answer, 3 + turn, 4, 5]
        await nodes.settle()
        after = sum(nodes.engines[n].stats.prompt_tokens_computed for n in ("first", "second"))
        return tokens, after - before

    expected, all_computed = await conversation("")
    # Behind what decode has, which is all but the answer's last block, only the new part is left.
    new_part = 20 + 2 * (3 + 2 * BLOCK)
    for _ in TRIES:
        tokens, computed = await conversation("decode")
        assert tokens == expected
        if computed <= new_part:
            break
    assert computed <= new_part < all_computed


async def test_tenants_get_nothing_of_each_other(nodes: Nodes) -> None:
    await nodes.forget()
    prompt = prompt_of(3)
    expected = await nodes.turn(prompt, "first", salt="a")
    before = nodes.count("second", "prefix_pulled_tokens")
    for salt in ("", "b"):
        assert await nodes.turn(prompt, "second", "first", salt) == expected
    await nodes.settle()
    assert nodes.count("second", "prefix_pulled_tokens") == before
    assert nodes.count("second", "prefix_misses") >= 2


@pytest.mark.parametrize("holder", ["prefill/127.0.0.1:1", "nobody", "second"])
async def test_without_a_peers_help_the_prompt_is_computed(nodes: Nodes, holder: str) -> None:
    """It is not there, is no address, or is the node itself."""
    await nodes.forget()
    prompt = prompt_of(4)
    expected = await nodes.turn(prompt, "first")
    assert await nodes.turn(prompt, "second", holder) == expected


async def test_a_request_that_is_aborted_while_it_waits_for_a_prefix(nodes: Nodes) -> None:
    await nodes.forget()
    prompt = prompt_of(6)
    await nodes.turn(prompt, "first")
    second = nodes.engines["second"]
    ask, asked, go_on = second.prefixes.ask, asyncio.Event(), asyncio.Event()
    assert ask is not None

    async def ask_slowly(what: object) -> object:
        answer = await ask(what)  # type: ignore[arg-type]
        asked.set()
        await go_on.wait()
        return answer

    second.prefixes.ask = ask_slowly  # type: ignore[assignment]
    spec = RequestSpec(prompt, SamplingParams(max_tokens=1))
    request = replace(GenerationRequest("gone", spec), prefix_holder=nodes.addresses["first"])
    stream = second.generate(request)
    await asked.wait()
    stream.close()
    go_on.set()
    second.prefixes.ask = ask
    await nodes.settle()


async def test_a_peer_dies_during_the_pull(nodes: Nodes) -> None:
    """Its transfer processes are stopped when the pull begins, and killed a moment later: the
    request is answered, and nothing stays held."""
    prompt = prompt_of(5)
    first, second = nodes.engines["first"], nodes.engines["second"]
    failures = nodes.count("second", "prefix_pull_failures")
    ask = second.prefixes.ask
    assert ask is not None

    async def ask_and_stop(what: object) -> object:
        answer = await ask(what)  # type: ignore[arg-type]
        (pid,) = find_processes(first.core_pid, "kv_transfer")
        os.kill(pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(0.2, os.kill, pid, signal.SIGKILL)
        return answer

    for _ in TRIES:
        await until(lambda: nodes.count("first", "processes_ready") == 1, "its process")
        await nodes.forget()
        expected = await nodes.turn(prompt, "first")
        await nodes.settle()
        second.prefixes.ask = ask_and_stop  # type: ignore[assignment]
        try:
            assert await nodes.turn(prompt, "second", "first") == expected
        finally:
            second.prefixes.ask = ask
        await nodes.settle()
        if nodes.count("second", "prefix_pull_failures") > failures:
            break
    assert nodes.count("second", "prefix_pull_failures") == failures + 1

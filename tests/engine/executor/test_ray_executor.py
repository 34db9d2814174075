"""One engine over two Ray hosts, its ranks, stages or data-parallel groups: tokens, KV transfer,
and the end of everything."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from edge.security.config import SecurityConfig
from engine.config import EngineConfig
from engine.contracts.errors import EngineDeadError
from engine.contracts.messages import LoadProgress
from engine.contracts.reports.profiles import ProfileOptions
from engine.executor.factory import create_executor
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.request_stream import RequestStream
from engine.inspection_config import InspectionConfig
from kv_transfer.config import KVRole, KVTransferConfig
from kv_transfer.metadata import KVTransferParams
from tests.engine.core.tiny_engine import Oracle, make_request, tiny_config, until, until_empty
from tests.engine.core.trace_file import steps_of
from tests.engine.executor.ray_hosts import ROOT, RayHosts, ray_hosts
from tests.network_namespaces import Switch
from tests.processes import is_alive, is_gone

NUM_REQUESTS = 12

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
"""Many processes start here, each of which imports Ray or torch."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[RayHosts]:
    with ray_hosts() as hosts, pytest.MonkeyPatch.context() as patch:
        for name, value in hosts.env.items():
            patch.setenv(name, value)
        yield hosts


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    oracle = Oracle()
    yield oracle
    oracle.close()


def ray_config(hosts: RayHosts, kv_role: KVRole | None = None) -> EngineConfig:
    config = tiny_config(2, async_scheduling=True)
    parallel = replace(
        config.parallel,
        distributed_executor_backend="ray",
        ray_address=hosts.address,
        ray_timeout_s=240,
    )
    transfer = transfer_config(kv_role, hosts.addresses[0]) if kv_role else None
    return replace(config, parallel=parallel, kv_transfer=transfer)


def transfer_config(kv_role: KVRole, address: str) -> KVTransferConfig:
    trusting = SecurityConfig(allow_plaintext=True)
    return KVTransferConfig(kv_role=kv_role, num_streams=2, hosts=(address,), security=trusting)


async def tokens(stream: RequestStream) -> list[int]:
    return [token for output in [o async for o in stream] for token in output.token_ids]


async def until_ended(llm: AsyncLLM, hosts: RayHosts) -> None:
    """Waits until no process of the engine is left, on either host, nor what Ray started for it."""
    pids = [llm.core_pid, *llm.ready.worker_pids, *llm.ready.transfer_pids]
    await until(lambda: all(not is_alive(pid) for pid in pids), "the end of all processes")
    assert is_gone(llm.core_pid)
    await until(lambda: not any(node.actors() for node in hosts.nodes), "the end of all actors")


def test_no_ray_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the node that asks for Ray needs it."""
    config = tiny_config(2)
    config = replace(config, parallel=replace(config.parallel, distributed_executor_backend="ray"))
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in [name for name in sys.modules if name.startswith("engine.executor.ray")]:
        monkeypatch.delitem(sys.modules, name)
    with zmq.Context() as context, pytest.raises(EngineDeadError, match=r"tandem\[ray\]"):
        create_executor(config, context)


@pytest.mark.parametrize("address", ["127.0.0.9:1", "ray://127.0.0.9:10001/x"])
def test_no_cluster_at_the_address(address: str) -> None:
    from engine.executor.ray.ray_cluster import RayCluster

    parallel = replace(tiny_config(2).parallel, ray_address=address)
    cluster = RayCluster(parallel, "cpu", "test")
    with pytest.raises(EngineDeadError, match=f"found no Ray cluster at {address}: .*ray start"):
        cluster.connect()
    cluster.close()


def decode_engine(hosts: RayHosts) -> Awaitable[AsyncLLM]:
    transfer = transfer_config("kv_consumer", hosts.addresses[0])
    return AsyncLLM.start(replace(tiny_config(), kv_transfer=transfer))


async def started(*starting: Awaitable[AsyncLLM]) -> list[AsyncLLM]:
    """Starts engines side by side. If one fails, none stays."""
    found = await asyncio.gather(*starting, return_exceptions=True)
    engines = [one for one in found if isinstance(one, AsyncLLM)]
    for error in found:
        if isinstance(error, BaseException):
            await asyncio.gather(*(engine.shutdown() for engine in engines))
            raise error
    return engines


async def check_joined(prefill: AsyncLLM, decode: AsyncLLM, oracle: Oracle) -> None:
    """The one engine computes prompts, the other goes on behind them with KV from both hosts."""

    async def joined(seed: int) -> None:
        request_id, transfer_id = f"joined-{seed}", f"{seed:032x}"
        export = make_request(request_id, seed, max_tokens=1)
        export.kv_transfer_params = KVTransferParams(do_remote_decode=True, transfer_id=transfer_id)
        pull = make_request(request_id, seed)
        pull.kv_transfer_params = KVTransferParams(
            do_remote_prefill=True, transfer_id=transfer_id, peer=prefill.ready.peer
        )
        stream = decode.generate(pull)
        received = asyncio.create_task(decode.wait_kv_result(request_id))
        for token_id in await tokens(prefill.generate(export)):
            decode.supply_first_token(request_id, token_id)
        assert (await prefill.wait_kv_result(request_id)).ok
        assert await tokens(stream) == oracle.tokens(seed), seed
        result = await received
        assert result.ok and result.stats.num_bytes > 0

    await asyncio.gather(*(joined(seed) for seed in range(NUM_REQUESTS)))


def test_hosts_have_nothing_but_a_network_in_common(hosts: RayHosts) -> None:
    if not isinstance(hosts.switch, Switch):
        pytest.skip(hosts.switch)
    processes = [*(str(node.raylet) for node in hosts.nodes), "thread-self"]
    leader, other, own = (Path(f"/proc/{process}/ns/net").stat().st_ino for process in processes)
    assert leader == own != other


async def test_prefill_over_two_hosts_equals_one(
    hosts: RayHosts, oracle: Oracle, tmp_path: Path
) -> None:
    """Two hosts serve requests that the group computes alone, and requests whose KV both hosts send
    to a decode engine; a profile names both. Then the group is shut down in peace, and the next one
    finds all places free.
    """
    inspection = InspectionConfig(torch_profiler_dir=str(tmp_path))
    progress: list[LoadProgress] = []
    leader, other = hosts.addresses
    prefill, decode = await started(
        AsyncLLM.start(
            replace(ray_config(hosts, "kv_producer"), inspection=inspection), progress.append
        ),
        decode_engine(hosts),
    )
    try:
        stages = [one.stage for one in progress]
        assert "waiting for hosts" in stages and "loading weights" in stages
        peer = prefill.ready.peer
        assert peer is not None
        listening = [addresses[0].rpartition(":")[0] for addresses in peer.endpoints]
        assert listening == [leader, other], "each rank's KV is at its own host"

        async def alone(seed: int) -> None:
            found = await tokens(prefill.generate(make_request(f"alone-{seed}", seed)))
            assert found == oracle.tokens(seed), seed

        await asyncio.gather(*(alone(seed) for seed in range(NUM_REQUESTS)))
        await prefill.profiles.start(ProfileOptions())
        await alone(NUM_REQUESTS)
        here, there = (await prefill.profiles.stop()).traces
        assert (here.host, there.host) == (socket.gethostname(), other)
        assert steps_of(here.path) == steps_of(there.path) != []
        await check_joined(prefill, decode, oracle)
        await until_empty(prefill)
        os.kill(prefill.ready.transfer_pids[1], signal.SIGKILL)
        await until(
            lambda: (
                prefill.stats.kv_transfer["process_restarts"] == 1
                and prefill.stats.kv_transfer["processes_ready"] == 2
            ),
            "the other host's transfer process again",
        )
    finally:
        await asyncio.gather(prefill.shutdown(), decode.shutdown())
    await until_ended(prefill, hosts)


@asynccontextmanager
async def doomed_engine(hosts: RayHosts, config: EngineConfig) -> AsyncIterator[AsyncLLM]:
    with tempfile.TemporaryDirectory() as folder:
        inspection = InspectionConfig(crash_report_dir=folder)
        llm = await AsyncLLM.start(replace(config, inspection=inspection))
        try:
            yield llm
            assert llm.is_dead
        finally:
            await llm.shutdown()
        report = json.loads(Path(llm.crash_report).read_text(encoding="utf-8"))
    assert report["reason"] == llm.dead_reason and report["steps"]
    await until_ended(llm, hosts)


async def reason_of_death(llm: AsyncLLM, pid: int) -> str:
    """Returns what streams are told that run after `pid` was killed: a host's workers outlive its
    raylet for a moment, in which a stream may still end.
    """
    stream = llm.generate(make_request("long", 1, max_tokens=90))
    with pytest.raises(EngineDeadError) as error:
        await anext(stream)
        os.kill(pid, signal.SIGKILL)
        await tokens(stream)
        for number in itertools.count(2):
            await tokens(llm.generate(make_request(f"long {number}", number, max_tokens=90)))
    assert await llm.wait_dead() == str(error.value)
    return str(error.value)


async def test_groups_on_two_hosts_then_a_hanging_worker_and_a_killed_actor(
    hosts: RayHosts,
) -> None:
    driver = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.engine.executor.ray_driver", hosts.address),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert driver.stdin is not None and driver.stdout is not None

    async def answer() -> object:
        assert driver.stdout is not None
        while not (line := await driver.stdout.readline()).startswith((b'"', b"[")):
            assert line, "the driver has ended"
        return json.loads(line)

    try:
        assert await answer() == [0, 1], "KV came from the groups of both hosts"
        reason, other = await answer(), hosts.addresses[1]
        stopped = "has not taken the step (process state T)"
        assert str(reason).startswith(
            f"a step did not finish within 0.5 s: worker 0 {stopped}, worker 1 on {other} {stopped}"
        )
        (actor,) = hosts.nodes[1].actors()
        os.kill(actor, signal.SIGKILL)
        driver.stdin.write(b"\n")
        reason = await answer()
        assert str(reason).startswith(f"worker 1 on {other} was lost with its Ray actor or host")
        pids = await answer()
        assert isinstance(pids, list) and len(pids) == 2
        assert await driver.wait() == 0
    finally:
        if driver.returncode is None:
            driver.kill()
            await driver.wait()
    await until(lambda: not any(is_alive(pid) for pid in pids), "the end of all workers")
    await until(lambda: not any(node.actors() for node in hosts.nodes), "the end of all actors")


async def test_killed_raylet(hosts: RayHosts, oracle: Oracle) -> None:
    """Two hosts are pipeline stages, each of which hands its layers over, until that of the raylet
    is lost."""
    config = ray_config(hosts, "kv_producer")
    stages = replace(config.parallel, tensor_parallel_size=1, pipeline_parallel_size=2)
    async with doomed_engine(hosts, replace(config, parallel=stages)) as llm:
        decode = await decode_engine(hosts)
        try:
            await check_joined(llm, decode, oracle)
        finally:
            await decode.shutdown()
        asked = [llm.generate(make_request(f"alone-{seed}", seed)) for seed in range(NUM_REQUESTS)]
        for seed, found in enumerate(await asyncio.gather(*map(tokens, asked))):
            assert found == oracle.tokens(seed), seed
        reason = await reason_of_death(llm, hosts.nodes[1].raylet)
        assert reason.startswith(f"worker 1 on {hosts.addresses[1]} was lost with its Ray actor")

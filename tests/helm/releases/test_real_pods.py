"""The chart's pods as processes: what an operator does to a cluster that serves.

One cluster for all tests of this file, in their order, though each also runs alone: a release with
a router, two prefill nodes and a decode node, booted from a kept release's chart alone. They begin
with a token alone; on the way an upgrade brings the tree's chart and turns TLS on, by certificates
that the chart makes.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from release import project
from tests.helm.releases.helm_release import CliRelease
from tests.helm.releases.load import Load, body, stream
from tests.helm.releases.open_connections import component, open_connections
from tests.helm.releases.serving import (
    EITHER,
    NO_TLS,
    START_S,
    TLS,
    Serving,
    num_open,
    scraped,
    values,
)
from tests.helm.releases.test_upgrade_from_release import PROCESSES_FROM
from tests.kubernetes_stand_in.cert_manager import Authority, leaf
from tests.kubernetes_stand_in.cluster import NAMESPACE, Cluster
from tests.kubernetes_stand_in.network_policies import allows
from tests.kubernetes_stand_in.resources import Object
from tests.processes import is_alive

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

_NUM_REQUESTS = 8
NODES = ("one-host", "other-host")
NEEDED_WAYS = {("router", "decode"), ("router", "prefill"), ("decode", "prefill")}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    folder = tmp_path_factory.mktemp("cluster")
    async with Cluster.real(folder, nodes=NODES) as cluster:
        release = CliRelease(cluster, folder)
        try:
            await release.install(values(cluster, prefill=2), wait_s=0, chart=PROCESSES_FROM)
            await cluster.wait_ready(START_S, router=1, prefill=2, decode=1)
            service = cluster.get("Service", "tandem-router")["spec"]
            url = f"http://{service['clusterIP']}:{service['ports'][0]['port']}"
            serving = Serving(cluster, release, url)
            await serving.wait_known(prefill=2, decode=1)
            wishes = (stream(url, body(i)) for i in range(_NUM_REQUESTS))
            serving.expected += await asyncio.gather(*wishes)
            yield serving
        finally:
            print(cluster.logs())  # shown if a test fails
            pids = cluster.pids()
    assert not [pid for pid in pids if is_alive(pid)]


async def test_a_prompt_goes_through_both_tiers(serving: Serving) -> None:
    """The release's own test says so, in a pod of its own."""
    await serving.release.test()


async def test_scaling_each_tier_under_load_loses_nothing(serving: Serving) -> None:
    """The test adds a decode node, one prefill node less; what stays is not touched."""
    cluster = serving.cluster
    before = {name: cluster.uids(name) for name in ("router", "prefill", "decode")}
    async with Load(serving.url, serving.expected) as load:
        cluster.scale("Deployment", "tandem-decode", 2)
        cluster.scale("Deployment", "tandem-prefill", 1)
        await cluster.wait_ready(START_S, router=1, prefill=1, decode=2)
        await serving.wait_known(prefill=1, decode=2)
        await load.answers(10)
    assert not load.faults
    assert cluster.uids("router") == before["router"]
    assert cluster.uids("decode") > before["decode"]
    assert cluster.uids("prefill") < before["prefill"]


async def test_turning_tls_on_rolls_everything_under_load_and_loses_nothing(
    serving: Serving,
) -> None:
    """It begins when a decode pod was just deleted in the middle of its answers, and is the upgrade
    from that release's chart. The new router finds the nodes by DNS, where there is one."""
    await serving.reach(NO_TLS)
    assert chart_label(serving) == PROCESSES_FROM.stem
    pod, answers = await serving.begin_long_answers()
    serving.cluster.delete_pod(pod)
    async with Load(serving.url, serving.expected) as load:
        await serving.roll(EITHER)
        await serving.check_long(answers)
        before = await plaintext_connections(serving)
        assert len(before) == 3
        await load.answers(10)
        assert await plaintext_connections(serving) == before, "not all pods speak TLS"
    assert not load.faults
    assert chart_label(serving) == f"tandem-{project()['version']}"


async def test_turning_plaintext_off_under_load_loses_nothing(serving: Serving) -> None:
    await serving.reach(EITHER)
    async with Load(serving.url, serving.expected) as load:
        await serving.roll(TLS)
        await load.answers(10)
    assert not load.faults
    assert not await plaintext_connections(serving)
    async with aiohttp.ClientSession() as session:
        for pod in serving.cluster.pods("decode"):
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://{pod['status']['podIP']}:8100/health")
    await serving.release.test()


def chart_label(serving: Serving) -> str:
    """Returns the chart that the running objects came with."""
    labels = serving.cluster.get("Deployment", "tandem-decode")["metadata"]["labels"]
    return str(labels["helm.sh/chart"])


async def plaintext_connections(serving: Serving) -> dict[str, list[float]]:
    """Returns what nodes count that accept them, by address: of the node's ports, and of KV."""
    addresses = [
        pod["status"]["podIP"]
        for tier in ("prefill", "decode")
        for pod in serving.cluster.pods(tier)
    ]
    name = "tandem_plaintext_connections_total"
    accept = {one: await scraped(one, name) for one in addresses}
    return {
        one: counts + await scraped(one, "tandem_kv_transfer_plaintext_connections_total")
        for one, counts in accept.items()
        if counts
    }


async def test_connections_are_those_that_the_network_policies_allow(serving: Serving) -> None:
    """All that the services open to each other is let through, and strangers are not."""
    await serving.reach(TLS)
    cluster = serving.cluster
    seen: set[tuple[str, str, int]] = set()
    async with Load(serving.url, serving.expected) as load:
        async with asyncio.timeout(START_S):
            while {(a, b) for a, b, _ in seen} < NEEDED_WAYS or max_port(seen) < 8400:
                for source, target, port in open_connections(cluster.running()):
                    assert allows(cluster.store, source, target, port), (component(source), port)
                    seen.add((component(source), component(target), port))
                await load.answers(1)
    assert not load.faults
    own = {"namespace": NAMESPACE, "labels": {"app": "stranger"}}
    stranger: Object = {"metadata": own, "spec": {"containers": []}}
    scraper: Object = {"metadata": {"namespace": "monitoring", "labels": {}}, "spec": {}}
    for pod in (*cluster.pods("prefill"), *cluster.pods("decode")):
        for port in (8100, 8200, 8400, 6379):
            assert not allows(cluster.store, stranger, pod, port)
            assert not allows(cluster.store, scraper, pod, port)
        assert allows(cluster.store, scraper, pod, 8101)
    (router,) = cluster.pods("router")
    (prefill,) = cluster.pods("prefill")
    assert allows(cluster.store, stranger, router, 8000)
    assert not allows(cluster.store, router, prefill, 8400), "KV is for decode nodes"
    assert not allows(cluster.store, prefill, router, 8000)


def max_port(seen: set[tuple[str, str, int]]) -> int:
    return max((port for *_, port in seen), default=0)


async def test_renewed_certificates_are_used_without_a_restart(serving: Serving) -> None:
    """They are written into the Secrets as cert-manager does, and the kubelet turns a link in each
    pod."""
    await serving.reach(TLS)
    cluster = serving.cluster
    authority = Authority.of(cluster.get("Secret", "tandem-ca"))
    before = {pod["metadata"]["uid"]: pid for pod, pid in cluster.running()}
    async with Load(serving.url, serving.expected) as load:
        renewed = {
            name: renew(cluster, authority, name) for name in ("router", "prefill", "decode")
        }
        for tier, port in {"prefill": 8200, "decode": 8100}.items():
            for pod in cluster.pods(tier):
                await until_shown(pod["status"]["podIP"], port, renewed[tier])
        await load.answers(10)
    assert not load.faults
    assert {pod["metadata"]["uid"]: pid for pod, pid in cluster.running()} == before


def renew(cluster: Cluster, authority: Authority, name: str) -> bytes:
    """Returns the new certificate, as DER."""
    secret = cluster.get("Secret", f"tandem-{name}-tls")
    names = leaf(secret).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    dns_names = names.get_values_for_type(x509.DNSName)
    data = authority.issue(dns_names, datetime.now(UTC), timedelta(days=90))
    new = cluster.store.update({**secret, "data": data})
    return leaf(new).public_bytes(serialization.Encoding.DER)


async def until_shown(address: str, port: int, certificate: bytes) -> None:
    """Returns when a new connection is shown this certificate."""
    async with asyncio.timeout(START_S):
        while await asyncio.to_thread(shown, address, port) != certificate:
            await asyncio.sleep(0.05)


def shown(address: str, port: int) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection((address, port)) as connection,
        context.wrap_socket(connection) as tls,
    ):
        return tls.getpeercert(binary_form=True) or b""


async def test_losing_a_host_under_load_loses_nothing_while_it_is_still_listed(
    serving: Serving,
) -> None:
    """First nobody knows but who calls its pods; then they count as not ready; at last others are
    made on the host that is left."""
    await serving.reach(TLS)
    await serving.spread_decodes()
    cluster = serving.cluster
    (router,) = cluster.pods("router")
    lost = next(node for node in NODES if node != router["spec"]["nodeName"])
    gone = {pod["status"]["podIP"]: pod for pod in on_node(cluster, lost)}
    decodes = [ip for ip, pod in gone.items() if component(pod) == "decode"]
    answers: list[asyncio.Task[str]] = []
    async with asyncio.timeout(START_S):
        while not sum([await num_open(ip) for ip in decodes]):
            answers += (await serving.begin_long_answers())[1]
    async with Load(serving.url, serving.expected) as load:
        cluster.lose_node(lost)
        await serving.check_long(answers)
        await load.answers(10)
        assert listed(cluster) >= set(gone), "routers were told, and nothing is shown"
        cluster.notice_lost_node(lost)
        await cluster.wait(lambda: not listed(cluster) & set(gone))
        cluster.evict_lost_node(lost)
        cluster.remove_node(lost)
        await cluster.wait_ready(START_S, router=1, prefill=1, decode=2)
        await serving.wait_known(prefill=1, decode=2)
        await load.answers(6)
    assert not load.faults
    left = {pod["spec"]["nodeName"] for pod in cluster.objects("Pod")}
    assert left == {router["spec"]["nodeName"]}


def on_node(cluster: Cluster, name: str) -> list[Object]:
    return [pod for pod in cluster.objects("Pod") if pod["spec"].get("nodeName") == name]


def listed(cluster: Cluster) -> set[str]:
    """Returns the addresses that EndpointSlices call ready."""
    return {
        endpoint["addresses"][0]
        for slice_ in cluster.objects("EndpointSlice")
        for endpoint in slice_["endpoints"]
        if endpoint["conditions"]["ready"]
    }


async def test_losing_a_pod_of_each_tier_under_load_loses_nothing(serving: Serving) -> None:
    """Answers of the lost decode node go on at the other one, which computes prompts itself until
    there is a prefill node again."""
    await serving.reach(TLS)
    pod, answers = await serving.begin_long_answers()
    async with Load(serving.url, serving.expected) as load:
        serving.cluster.lose_pod(serving.cluster.pods("prefill")[0])
        serving.cluster.lose_pod(pod)
        await serving.check_long(answers)
        await load.answers(10)
    assert not load.faults


async def test_uninstall_stops_everything(serving: Serving) -> None:
    pids = serving.cluster.pids()
    await serving.release.uninstall()
    await serving.cluster.wait(lambda: not serving.cluster.objects("Pod"), timeout_s=30)
    assert not [pid for pid in pids if is_alive(pid)]
    kinds = {obj["kind"] for obj in serving.cluster.store.all()}
    assert kinds == {"Namespace", "Node"}

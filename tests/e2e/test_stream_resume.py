"""Real nodes killed, frozen and drained, and single processes of theirs frozen, in the middle of
thirty answers: every answer is the one of an undisturbed run, and nothing is left behind. Adapters
that were loaded meanwhile are there again when a node comes back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.serving.clusters.node_metrics import read_metrics
from tests.engine.lora.adapter_checkpoints import AdapterShape, write_adapter

NUM_STREAMS = 30
ADAPTERS = ("ada", "bob")
WORKER, CORE = "engine.executor.worker_proc", "engine.core.core_proc"
TRANSFER = "kv_transfer.control.process"
DECODE = ["--local-prefill-threshold", "8", "--drain-timeout-s", "0.2"]
ROUTER = ["--stale-after-s", "2", "--down-after-s", "4", "--stream-stall-s", "2.5"]
ROUTER += ["--no-node-wait-s", "60"]


def body(i: int) -> dict[str, Any]:
    """Request `i`: always the same. Between them they use all that a resume must carry on."""
    rng = random.Random(i)
    wish: dict[str, Any] = {
        "prompt": [10 + i, *(rng.randrange(10, 400) for _ in range(rng.choice([3, 40, 150])))],
        "max_tokens": rng.choice([60, 120]),
        "temperature": rng.choice([0.0, 0.8]),
        "seed": i,
        "ignore_eos": True,
    }
    if i % 3 == 1:
        wish |= {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    if i % 5 == 2:
        wish |= {"ignore_eos": False, "min_tokens": 50, "stop": [" the dog", "\n\n\n"]}
    if i % 5 == 4:
        wish["n"] = 3
    if i % 7 == 3:
        wish["logprobs"] = 2
    if i % 6 == 5:
        names = {"type": "array", "items": {"type": "string", "minLength": 4}, "minItems": 30}
        wish |= {"ignore_eos": False, "guided_json": names}
    return wish


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path) -> Path:
    """Returns a folder with two adapters, `ada` and `bob`."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(ADAPTERS):
        write_adapter(folder / name, demo_checkpoint, AdapterShape(seed, alpha=2.0))
    return folder


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(share_cluster: Any, adapters: Path) -> Any:
    lora = ["--enable-lora", "--max-loras", "2", "--lora-dir", str(adapters)]
    return await share_cluster(
        prefill=2, decode=3, prefill_args=lora, decode_args=[*DECODE, *lora], router_args=ROUTER
    )


@pytest_asyncio.fixture(loop_scope="session")
async def expected(cluster: Any, complete: Any) -> list[Any]:
    return await answers(cluster, complete)


async def answers(cluster: Any, complete: Any, on_event: Any = None) -> list[Any]:
    async with asyncio.timeout(100):
        return await asyncio.gather(
            *(complete(cluster.url, on_event=on_event, **body(i)) for i in range(NUM_STREAMS))
        )


def summary(answer: Any) -> tuple[Any, ...]:
    usage = {k: v for k, v in answer.usage.items() if k != "prompt_tokens_details"}
    return answer.status, answer.error, answer.text, answer.finish_reason, usage


@pytest.mark.e2e
async def test_decode_nodes_that_die_freeze_and_stop_cost_no_token(
    cluster: Any, complete: Any, http: Any, expected: list[Any], router_metrics: Any
) -> None:
    """A node may have ended all its answers before a late process of ours hurts it: then all of
    this is done again."""

    async def moves() -> tuple[int, int]:
        metrics = await router_metrics(http, cluster.url)
        return metrics["tandem_router_migrations_total"], metrics["tandem_router_retries_total"]

    for _ in range(4):
        before = await moves()
        found = await answers_while_nodes_go(cluster, complete, expected)
        moved, tried_again = (now - then for now, then in zip(await moves(), before, strict=True))
        for i, (got, wanted) in enumerate(zip(found, expected, strict=True)):
            assert summary(got) == summary(wanted), f"request {i}"
        await cluster.wait_whole()
        await cluster.wait_empty()
        # Each had answers. Those that had not begun are no moves: their requests are tried again.
        if moved >= 1 and moved + tried_again >= 3:
            return
    pytest.fail(f"nodes that went had no answers: {moved} moved, {tried_again} tried again")


async def answers_while_nodes_go(cluster: Any, complete: Any, expected: list[Any]) -> list[Any]:
    """One decode node is killed, one freezes, one drains."""
    num_events = num_begun = 0
    total = sum(answer.num_events for answer in expected)
    kill, freeze, drain = cluster.decodes
    frozen: list[int] = []
    drained: list[int] = []

    def on_event(nth: int) -> None:
        """Thirds of the way. The last node goes when all answers have begun: they wait for another,
        and a request that has not begun would be refused, if none has come back yet."""
        nonlocal num_events, num_begun
        num_events += 1
        num_begun += nth == 1
        if num_events == total // 6:
            os.kill(kill.pid, signal.SIGKILL)
        elif num_events == total // 3:
            frozen.append(freeze.pid)
            os.kill(freeze.pid, signal.SIGSTOP)
        elif num_events >= total // 2 and num_begun == NUM_STREAMS and not drained:
            drained.append(drain.pid)
            os.kill(drain.pid, signal.SIGTERM)

    try:
        found = await answers(cluster, complete, on_event)
    finally:
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert frozen and drained
    return found


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("of_decode", "of_prefill"), [(CORE, WORKER), (WORKER, CORE), (TRANSFER, TRANSFER)]
)
async def test_a_frozen_process_of_a_node_holds_up_no_answer(
    cluster: Any, complete: Any, find: Any, expected: list[Any], of_decode: str, of_prefill: str
) -> None:
    """They sleep until all answers are there. Their node servers live, and must not speak for
    them. Many prompts are on their way by then, and some answers have begun."""
    await cluster.wait_whole()
    await cluster.wait_empty()
    num_events = 0
    frozen: list[int] = []

    def on_event(_: int) -> None:
        nonlocal num_events
        num_events += 1
        if num_events == NUM_STREAMS // 3:
            for node, module in [
                (cluster.decodes[0], of_decode),
                (cluster.prefills[0], of_prefill),
            ]:
                frozen.append(find(node.pid, module))
                os.kill(frozen[-1], signal.SIGSTOP)

    try:
        found = await answers(cluster, complete, on_event)
    finally:
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert len(frozen) == 2
    for i, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        assert summary(got) == summary(wanted), f"request {i}"
    await cluster.wait_whole()
    await cluster.wait_empty()


@pytest.mark.e2e
async def test_a_beam_search_whose_node_dies_begins_again(cluster: Any, http: Any) -> None:
    """Its client has nothing of the answer by then, and gets the same one."""
    wish = {"prompt": [*range(10, 130)], "use_beam_search": True, "best_of": 4, "n": 3}
    wish |= {"max_tokens": 300, "ignore_eos": True}

    async def ask() -> Any:
        async with http.post(f"{cluster.url}/v1/completions", json=wish) as response:
            return response.status, await response.json()

    async def ask_and_kill() -> tuple[int, Any] | None:
        """Returns the answer; None where it came before its node was found."""
        answer = asyncio.create_task(ask())
        while not answer.done():
            for node in cluster.decodes:
                metrics = await read_metrics(http, node.metrics_url)
                if metrics["vllm:num_requests_running"] > 0 and not answer.done():
                    os.kill(node.pid, signal.SIGKILL)
                    return await answer
            await asyncio.sleep(0.01)
        return None

    status, expected = await ask()
    assert status == 200, expected
    async with asyncio.timeout(100):
        while (answer := await ask_and_kill()) is None:
            pass
    status, found = answer
    assert status == 200, found
    assert found["choices"] == expected["choices"]
    assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    await cluster.wait_whole()
    await cluster.wait_empty()


def adapted_body(i: int) -> dict[str, Any]:
    """Request `i`: each prompt is for the model itself and for both adapters."""
    return {
        "model": ("demo", *ADAPTERS)[i % 3],
        "prompt": [10 + i // 3, *range(20, (60, 180)[i // 6])],
        "max_tokens": 60,
        "temperature": (0.0, 0.8)[i // 3 % 2],
        "seed": i // 3,
        "ignore_eos": True,
    }


@pytest.mark.e2e
async def test_a_killed_node_has_again_what_was_loaded_while_it_ran(
    cluster: Any, complete: Any, http: Any, router_metrics: Any
) -> None:
    """Answers are those of one node alone: through two tiers, in batches of several adapters, and
    where their node dies."""

    async def call(path: str, body: dict[str, Any]) -> None:
        async with http.post(cluster.url + path, json=body) as response:
            assert response.status == 200, await response.text()

    async def ask(url: str) -> list[Any]:
        async with asyncio.timeout(100):
            asked = (complete(url, **adapted_body(i)) for i in range(12))
            return [summary(answer) for answer in await asyncio.gather(*asked)]

    async def ask_and_kill() -> Any:
        """Returns the node that was killed; None where all answers came before it was found."""
        asking = asyncio.create_task(ask(cluster.url))
        killed = None
        while not asking.done() and killed is None:
            for node in cluster.decodes:
                async with http.get(node.metrics_url) as response:
                    is_at_work = re.search('running_lora_adapters="[a-z]', await response.text())
                if is_at_work and not asking.done():
                    killed = node
                    os.kill(node.pid, signal.SIGKILL)
                    break
            await asyncio.sleep(0.01)
        assert await asking == one_node
        return killed

    async def until_served(node: Any, *names: str) -> None:
        served: set[str] = set()
        while served != {"demo", *names}:
            async with http.get(f"{node.url}/v1/models") as response:
                served = {card["id"] for card in (await response.json())["data"]}
            await asyncio.sleep(0.05)

    for name in ADAPTERS:
        await call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": name})
    one_node = await ask(cluster.decodes[0].url)
    assert [answer[0] for answer in one_node] == [200] * 12, one_node
    for first in range(0, 12, 3):
        texts = {answer[2] for answer in one_node[first : first + 3]}
        assert len(texts) == 3, "adapters must change answers"
    assert await ask(cluster.url) == one_node
    async with asyncio.timeout(100):
        while (node := await ask_and_kill()) is None:
            pass
    await cluster.wait_whole()
    async with asyncio.timeout(60):
        await until_served(node, *ADAPTERS)
    assert await ask(node.url) == one_node
    for name in ADAPTERS:
        await call("/v1/unload_lora_adapter", {"lora_name": name})
    async with asyncio.timeout(60):
        for one in cluster.decodes:
            await until_served(one)
        while (await router_metrics(http, cluster.url))["tandem_router_adapters_behind"]:
            await asyncio.sleep(0.05)
    await cluster.wait_empty()

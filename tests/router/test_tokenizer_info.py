"""GET /tokenizer_info through a router: benchmark clients find their tokenizer by it."""

from __future__ import annotations

from tests.router.cluster import Cluster, RunningRouter

INFO = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}


async def ask(router: RunningRouter) -> tuple[int, dict[str, object]]:
    async with router.client.get(router.url + "/tokenizer_info") as answer:
        return answer.status, await answer.json()


async def test_any_node_that_may_tell_is_the_answer(cluster: Cluster) -> None:
    silent, telling = [await cluster.decode(f"d{i}") for i in range(2)]
    telling.tokenizer = INFO
    router = await cluster.router(silent, telling)
    assert await ask(router) == (200, INFO)
    await silent.stop_http()
    assert await ask(router) == (200, INFO)


async def test_where_nodes_may_not_tell_the_setting_is_named(cluster: Cluster) -> None:
    decode = await cluster.decode()
    router = await cluster.router(decode)
    status, body = await ask(router)
    assert status == 404
    assert "--enable-tokenizer-info-endpoint" in str(body)
    await decode.stop_http()
    assert (await ask(router))[0] == 503


async def test_of_two_models_none_is_picked(cluster: Cluster) -> None:
    nodes = [await cluster.decode(f"d{i}") for i in range(2)]
    for node in nodes:
        node.tokenizer = INFO
    await nodes[1].status.change(model_name="other")
    router = await cluster.router(*nodes)
    status, body = await ask(router)
    assert status == 400
    assert "other" in str(body)

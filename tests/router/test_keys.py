"""Keys and tenants: what the file may say, how it is read again, and what a tenant's salt does."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from router.edge.api_keys import ApiKeys
from router.edge.key_file import read_keys
from router.errors import ConfigurationError
from router.request.tenants import ANYONE, Priority
from tests.router.cluster import Cluster, eventually
from tests.router.token_server import TokenHandler

BODY = {"model": "demo", "prompt": "hello", "seed": 7, "max_tokens": 3, "stream": True}


def digest(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def tenant(name: str, *keys: str, more: str = "") -> str:
    listed = ", ".join(f'"{digest(key)}"' for key in keys)
    return f'[[tenants]]\nname = "{name}"\nkeys = [{listed}]\n{more}\n'


def test_a_tenant_has_all_that_the_file_says() -> None:
    more = 'requests_per_s = 2\ntokens_per_s = 1e4\npriority = "interactive"\nsalt = "s"'
    (old, new) = read_keys(tenant("acme", "old", "new", more=more))
    assert old.tenant == new.tenant
    assert (old.tenant.name, old.tenant.requests_per_s, old.tenant.tokens_per_s) == ("acme", 2, 1e4)
    assert old.tenant.priority is Priority.INTERACTIVE
    assert new.digest == hashlib.sha256(b"new").digest()


def test_tenants_share_cached_prompts_only_when_the_file_says_so() -> None:
    salts = {
        name: read_keys(tenant(name, name, more=more))[0].tenant.salt
        for name, more in {
            "a": "", "b": "", "c": 'salt = "x"', "d": 'salt = "x"', "e": 'salt = "a"',
            "f": 'salt = ""',
        }.items()
    }  # fmt: skip
    assert salts["c"] == salts["d"]
    assert len({salts[name] for name in "abce"}) == 4
    assert salts["f"] == b"" == ANYONE.salt
    assert salts["c"] != b"x"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not toml", "cannot be read"),
        ("[[tenants]]\nname = 'a'", "keys"),
        (tenant("a"), "one or two keys, not 0"),
        (tenant("a", "1", "2", "3"), "one or two keys, not 3"),
        (tenant("a b", "1"), "name"),
        (tenant("a", "1", more="speed = 3"), "speed"),
        (tenant("a", "1", more="requests_per_s = -1"), "requests_per_s"),
        (tenant("a", "1", more="priority = 'first'"), "priority"),
        (tenant("a", "1") + tenant("a", "2"), "two tenants named a"),
        (tenant("a", "1") + tenant("b", "1"), "one key twice"),
        ('[[tenants]]\nname = "a"\nkeys = ["plain-secret"]', "never the key"),
    ],
)
def test_a_wrong_file_is_named_and_shows_no_key(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as error:
        read_keys(text)
    assert "plain-secret" not in str(error.value)


def replace(path: Path, text: str) -> None:
    """At once, as mounted secrets change."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def test_keys_change_with_the_file_and_stay_when_it_breaks(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(tenant("acme", "old"))
    keys = ApiKeys("fixed", path)

    def admitted(*names: str) -> list[bool]:
        return [keys.admit([name]) is not None for name in names]

    assert admitted("fixed", "old", "new", "") == [True, True, False, False]
    assert not keys.reload()
    replace(path, tenant("acme", "old", "new"))
    assert keys.reload()
    assert admitted("old", "new") == [True, True]
    replace(path, tenant("acme", "new"))
    assert keys.reload()
    assert admitted("old", "new") == [False, True]
    for broken in ("broken", "", "a = " + "[" * 10_000):
        replace(path, broken)
        assert not keys.reload()
        assert admitted("old", "new", "fixed") == [False, True, True]
    path.unlink()
    assert not keys.reload()
    assert admitted("new") == [True]


def test_a_router_with_an_unusable_file_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        ApiKeys(file=tmp_path / "missing")


def test_an_empty_list_of_tenants_admits_nobody(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("tenants = []")
    assert ApiKeys(file=path).admit(["x"]) is None


async def test_a_tenant_s_salt_reaches_the_node_and_a_client_s_does_not(
    cluster: Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(tenant("acme", "a") + tenant("open", "b", more='salt = ""'))
    node = await cluster.decode(handler=TokenHandler())
    router = await cluster.router(node, api_key_file=path)
    for key in ("a", "b"):
        await router.text(BODY, authorization=f"Bearer {key}", x_tandem_cache_salt="mine")
    (first, _), (second, _) = node.requests
    assert first["x-tandem-cache-salt"] == read_keys(path.read_text())[0].tenant.salt.hex()
    assert "x-tandem-cache-salt" not in second
    assert "authorization" not in first


async def test_metrics_of_a_tenant_go_with_it(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(tenant("acme", "a") + tenant("other", "b"))
    node = await cluster.decode(handler=TokenHandler())
    router = await cluster.router(node, api_key_file=path)
    await router.text(BODY, authorization="Bearer a")

    def count(name: str) -> float:
        return router.metric("tandem_router_tenant_requests_total", tenant=name, status="200")

    assert count("acme") == 1
    replace(path, tenant("other", "b"))
    await eventually(lambda: count("acme") == 0)
    async with router.post(BODY, authorization="Bearer a") as response:
        assert response.status == 401
    await asyncio.sleep(0)
    await router.text(BODY, authorization="Bearer b")
    assert count("other") == 1

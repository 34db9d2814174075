"""`tandem nodes` lists nodes by a router, drains one, takes it back, and says why it could not."""

from __future__ import annotations

import asyncio

import pytest

from cli.nodes import main
from tests.router.cluster import run_cluster

Captured = pytest.CaptureFixture[str]


async def test_nodes_are_listed_drained_and_taken_back(capsys: Captured) -> None:
    async with run_cluster() as cluster:
        decode, prefill = await cluster.decode("d"), await cluster.prefill("p")
        router = await cluster.router(decode, prefill)
        capsys.readouterr()

        async def run(*args: str) -> tuple[int, str]:
            code = await asyncio.to_thread(main, [*args, "--url", f"{router.url}/v1"])
            said = capsys.readouterr()
            return code, said.out + said.err

        code, table = await run()
        head, *rows = (line.split() for line in table.splitlines())
        assert code == 0 and head[:5] == ["ID", "NODE", "GRPC", "ROLE", "STATE"]
        assert [row[:5] for row in rows] == [
            ["d", decode.target, f"{decode.host}:{decode.status_port}", "decode", "ready"],
            ["p", prefill.target, prefill.target, "prefill", "ready"],
        ]
        assert await run("drain", "p") == (
            0,
            f"{prefill.target} is drained; it has 0 requests\n",
        )
        assert prefill.status.load.drained
        code, told = await run("drain", prefill.target)
        assert code == 0 and "is drained (as before)" in told
        assert "drained" in (await run("list"))[1]
        code, told = await run("resume", "p")
        assert code == 0 and f"{prefill.target} is ready;" in told
        code, told = await run("drain", "no/body")
        assert code == 1 and "404" in told


@pytest.mark.parametrize("args", [["drain"], ["list", "d"], ["stop", "d"]])
def test_what_is_no_command_is_said_before_anything_is_asked(
    args: list[str], capsys: Captured
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    assert "tandem nodes" in capsys.readouterr().err


def test_a_router_that_is_not_there_is_said(capsys: Captured) -> None:
    assert main(["--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == (
        "http://127.0.0.1:1: nothing answers there (Connection refused); `tandem up` starts a "
        "cluster, --url names another\n"
    )

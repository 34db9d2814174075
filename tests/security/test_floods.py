"""Floods from peers without a token: what they send does not stay, and who has the token is served.

Each flood lasts for a moment, on loopback. Memory is the most that the process ever had.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.security.floods import FLOODS, Flood, attack

ATTACK_S = 0.3
MOST_GROWTH_MB = 24
TOKEN = "t" * 32
CALLS = {"grpc": "/tandem.v1.NodeStatus/Watch", "h2": "/tandem.v1.KVTransfer/PullKV"}


@dataclass
class Target:
    process: subprocess.Popen[str]
    kind: str
    port: int

    def peak_mb(self) -> int:
        """Returns the most memory that it has had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) >> 10

    def answers(self, token: str) -> grpc.StatusCode:
        """Returns what a call that gives this token comes to."""
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            metadata = [("x-tandem-cluster-token", token)]
            answers = channel.unary_stream(CALLS[self.kind])(b"", timeout=30, metadata=metadata)
            try:
                next(answers)
            except grpc.RpcError as error:
                return error.code()
            answers.cancel()
            return grpc.StatusCode.OK


@pytest.fixture(scope="module", params=["grpc", "h2"])
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    token_file = tmp_path_factory.mktemp("flood") / "token"
    token_file.write_text(TOKEN)
    argv = [sys.executable, "-m", "tests.security.flood_target", request.param, str(token_file)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        found = Target(process, request.param, int(process.stdout.readline()))
        assert found.answers(TOKEN) is grpc.StatusCode.OK
        assert found.answers("another") is grpc.StatusCode.UNAUTHENTICATED
        yield found
        process.stdin.close()
        assert process.wait(30) == 0


@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.__name__)
def test_a_flood_leaves_no_memory_behind(target: Target, flood: Flood) -> None:
    before = target.peak_mb()
    attack(target.port, flood, ATTACK_S, reads=False)
    attack(target.port, flood, ATTACK_S / 2, reads=True)
    assert target.answers(TOKEN) is grpc.StatusCode.OK
    assert target.peak_mb() - before <= MOST_GROWTH_MB

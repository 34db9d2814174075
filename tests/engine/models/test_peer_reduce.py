"""Small messages are added over memory that ranks share: the algorithm in Triton's interpreter, by
processes over shared memory; on a GPU, by processes that map each other's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.cluster import free_ports
from engine.peer_reducer import MAX_BYTES, ReduceLimits, ReducePlan, limits_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(400)
def test_ranks_add_in_order() -> None:
    """Ranks of the interpreter wait for each other, and for processors that others may keep."""
    pytest.importorskip("triton")
    script = ROOT / "tests" / "kernels" / "interpreted_reduce.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script), "3"],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=380,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def check_on_gpus(num_ranks: int) -> None:
    rendezvous = f"127.0.0.1:{free_ports(1)[0]}"
    command = [sys.executable, "-m", "tests.engine.models.reduce_process"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), rendezvous],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all("equal" in output for output in outputs), "\n".join(outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_processes_add_over_gpu_memory(num_ranks: int) -> None:
    """They take turns on the GPU, if it is the only one."""
    check_on_gpus(num_ranks)


@pytest.mark.multi_gpu
def test_gpus_add_over_each_others_memory() -> None:
    check_on_gpus(2)


def test_each_size_goes_the_way_that_was_quickest() -> None:
    times = {
        4096: [5.0, 7.0, 9.0],
        8192: [6.0, 7.0, 9.5],
        16384: [9.0, 8.0, 10.0],
        32768: [8.0, 9.0, 11.0],
        65536: [20.0, 12.0, 11.0],
        131072: [5.0, 5.0, 11.0],
    }
    assert limits_of(times) == ReduceLimits(8192, 32768)
    assert limits_of({4096: [9.0, 9.0, 9.0]}) == ReduceLimits(0, 0)
    assert limits_of({4096: [9.0, 5.0, 8.0]}) == ReduceLimits(0, 4096)


def test_limits_stay_within_the_memory() -> None:
    assert ReduceLimits.parse(f"4096,{MAX_BYTES * 8}") == ReduceLimits(4096, MAX_BYTES)


def test_a_plan_says_what_may_follow_the_limits() -> None:
    assert ReducePlan.parse("auto") == ReducePlan()
    assert ReducePlan.parse("auto+norm") == ReducePlan(None, False, True)
    assert ReducePlan.parse("4096,8192+push+norm") == ReducePlan(
        ReduceLimits(4096, 8192), True, True
    )

"""Small messages are added over memory that ranks share: the algorithm in Triton's interpreter, by
processes over shared memory; on a GPU, by processes that map each other's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.local_cluster.cluster import free_ports
from engine.parallel import mapped_memory, peer_reducer
from engine.parallel.distributed import ParallelGroup
from engine.parallel.mapped_memory import MAX_BYTES, MappedMemory, RankMemory, check_reach
from engine.parallel.peer_reducer import PeerReducer, ReduceLimits, ReduceTimes, limits_of, room_for
from host.termination import bound
from kv_transfer.errors import KVTransferError
from tests.engine.parallel.collective_scenes import play

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(400)
def test_ranks_add_in_order() -> None:
    """Ranks of the interpreter wait for each other, and for processors that others may keep."""
    pytest.importorskip("triton")
    script = ROOT / "tests" / "kernels" / "interpreted_reduce.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        bound([sys.executable, str(script)]),
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=380,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def check_on_gpus(num_ranks: int) -> None:
    rendezvous = f"127.0.0.1:{free_ports(1)[0]}"
    command = [sys.executable, "-m", "tests.engine.parallel.reduce_process"]
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
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gpus_add_over_each_others_memory(num_ranks: int) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"{num_ranks} GPUs are needed, each for a rank")
    check_on_gpus(num_ranks)


def test_each_size_goes_the_way_that_was_quickest() -> None:
    times = {
        4096: ReduceTimes(5.0, 7.0, 9.0, 6.0, 7.0),
        8192: ReduceTimes(6.0, 7.0, 9.5, 7.0, 7.0),
        16384: ReduceTimes(9.0, 8.0, 10.0, 9.5, 9.0),
        32768: ReduceTimes(8.0, 9.0, 11.0, 9.0, 9.5),
        65536: ReduceTimes(20.0, 12.0, 11.0, 20.0, 21.0),
        131072: ReduceTimes(5.0, 5.0, 11.0, 5.0, 6.0),
    }
    assert limits_of(times) == ReduceLimits(8192, 32768, 8192)


def test_the_library_sums_what_it_is_quicker_at() -> None:
    """A norm in the launch is then none either, however quick it was."""
    slow = ReduceTimes(9.0, 9.0, 9.0, 1.0, 10.0)
    assert limits_of({4096: slow}) == ReduceLimits(0, 0, 0)
    assert limits_of({4096: ReduceTimes(9.0, 5.0, 8.0, 9.0, 6.0)}) == ReduceLimits(0, 4096, 0)
    assert limits_of({}) == ReduceLimits()


def test_ranks_that_time_otherwise_go_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One shot looks quicker to rank 0 and slower to rank 1: ranks that differed in the sum that
    they time with its norm would wait for each other for ever."""
    pytest.importorskip("triton")
    of_ranks = {"_one_shot": (5.0, 7.5), "_two_shot": (6.0, 6.0)}
    timed: dict[int, list[str]] = {0: [], 1: []}

    def microseconds(way: Any, x: torch.Tensor) -> float:
        name = way.__name__
        return of_ranks[name][way.__self__._memory.rank] if name in of_ranks else 50.0

    def norm_times(self: PeerReducer, x: torch.Tensor, summed: Any, width: int) -> list[float]:
        timed[self._memory.rank].append(summed.__name__)
        return [7.0 + self._memory.rank, 7.5]

    monkeypatch.setattr(peer_reducer, "microseconds_in_graph", microseconds)
    monkeypatch.setattr(PeerReducer, "_is_right", lambda self, size, library, dtype: True)
    monkeypatch.setattr(PeerReducer, "_norm_times", norm_times)

    def measured(group: ParallelGroup) -> ReduceLimits:
        reducer = PeerReducer(
            MappedMemory(group.rank, torch.zeros(8), 4 << 20, {1 - group.rank: 0})
        )
        reducer.measure(group.all_reduce, torch.float32, 8)
        group.close()
        return reducer.limits

    assert play(measured, 2) == [ReduceLimits(0, 4 << 20, 1 << 20)] * 2
    assert timed[0] == timed[1] and set(timed[0]) == {"_two_shot"}


def test_norms_of_large_messages_have_their_own_launch() -> None:
    quick = ReduceTimes(5.0, 7.0, 9.0, 6.0, 7.0)
    assert limits_of({1 << 19: quick, 1 << 20: quick, 1 << 21: quick}).norm == 1 << 20


def test_noise_in_one_size_does_not_part_norms_from_their_sums() -> None:
    """As four H200s timed 4 KiB and 16 KiB."""
    even, quick = ReduceTimes(5.8, 9.7, 16.7, 7.20, 7.18), ReduceTimes(6.0, 10.0, 17.7, 7.3, 7.8)
    assert limits_of({4096: even, 16384: quick}).norm == 16384
    slow = ReduceTimes(6.0, 10.0, 17.7, 7.8, 7.3)
    assert limits_of({4096: even, 16384: slow}).norm == 4096


def test_what_is_larger_than_the_limit_has_its_norm_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    given: list[tuple[int, bool]] = []

    def at_once(self: PeerReducer, x: torch.Tensor, *rest: Any, two_shot: bool) -> torch.Tensor:
        given.append((len(x), two_shot))
        return x

    monkeypatch.setattr(PeerReducer, "reduce_norm_at_once", at_once)
    reducer = reducer_with(ReduceLimits(32, 1 << 12, norm=2 * 32))
    for rows in (1, 2, 3):
        found = reducer.reduce_norm(torch.zeros(rows, 8), torch.zeros(rows, 8), torch.ones(8), 1e-5)
        assert (found is None) == (rows > 2)
    assert given == [(1, False), (2, True)], "in as many shots as its sum"


@pytest.mark.parametrize(("norm", "fixed_order", "fuses"), [
    (64, False, True), (64, True, False), (0, False, False),
])  # fmt: skip
def test_in_fixed_order_no_norm_is_in_the_launch(norm: int, fixed_order: bool, fuses: bool) -> None:
    """It would depend on how many rows there are."""
    pytest.importorskip("triton")
    group = ParallelGroup(0, 1, fixed_order=fixed_order)
    assert not group.fuses_norm
    group.reducer = reducer_with(ReduceLimits(1 << 12, 1 << 12, norm))
    assert group.fuses_norm is fuses


def reducer_with(limits: ReduceLimits) -> PeerReducer:
    return PeerReducer(MappedMemory(0, torch.zeros(8), 4 << 20, {1: 0}), limits)


def test_limits_stay_within_the_memory() -> None:
    """There is room for the largest step, but for no more than `MAX_BYTES`."""
    limits = ReduceLimits.parse(f"4096,{MAX_BYTES * 8}")
    assert limits.within(MAX_BYTES) == ReduceLimits(4096, MAX_BYTES)
    assert ReduceLimits.parse("4096,8192,512") == ReduceLimits(4096, 8192, 512)
    assert [room_for(count * 8192) for count in (1, 512, 2048, 2049, 8192, 16384)] == [
        4 << 20, 4 << 20, 16 << 20, 32 << 20, 64 << 20, MAX_BYTES,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("peer", "why"),
    [
        (RankMemory("elsewhere", b"gpu 0", b"", 0), "rank 1 is on another host"),
        (RankMemory("here", b"gpu 9", b"", 0), "GPU of rank 1 is hidden"),
        (RankMemory("here", b"gpu 2", b"", 0), "link to rank 1 has no atomic operations"),
    ],
)
def test_ranks_that_cannot_reach_each_other_say_why(
    peer: RankMemory, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_memory, "cuda_driver", Links)
    with pytest.raises(KVTransferError, match=why):
        check_reach(RankMemory("here", b"gpu 0", b"", 0), peer, 1)


def test_ranks_reach_each_other_over_a_link_with_atomics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_memory, "cuda_driver", Links)
    own = RankMemory("here", b"gpu 0", b"", 0)
    check_reach(own, RankMemory("here", b"gpu 1", b"", 0), 1)
    check_reach(own, RankMemory("here", b"gpu 0", b"", 0), 1)


class Links:
    """Three GPUs, the first two of which are linked."""

    def device_uuids(self) -> list[bytes]:
        return [b"gpu 0", b"gpu 1", b"gpu 2"]

    def has_native_atomics(self, index: int, peer: int) -> bool:
        return {index, peer} == {0, 1}

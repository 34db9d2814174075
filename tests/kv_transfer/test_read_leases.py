"""A read lease is seen from outside for exactly as long as it lasts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kv_transfer.transports.in_place.read_leases import ReadLeases, ReadLeasesFile


def test_a_lease_lasts_until_it_is_let_go() -> None:
    leases = ReadLeases()
    first, second = leases.take(), leases.take()
    assert first.slot != second.slot and first.number != second.number
    assert all(leases.file.is_held(lease.slot, lease.number) for lease in (first, second))
    first.release()
    assert not leases.file.is_held(first.slot, first.number)
    assert leases.file.is_held(second.slot, second.number)


def test_the_next_one_in_a_slot_is_another() -> None:
    leases = ReadLeases()
    first = leases.take()
    first.release()
    second = leases.take()
    assert second.slot == first.slot and second.number != first.number
    first.release()
    assert leases.file.is_held(second.slot, second.number)
    assert not leases.file.is_held(first.slot, first.number)
    second.release()
    assert leases.num_held == 0


def test_other_processes_hold_other_numbers() -> None:
    """A slot of a process that took the place of a dead one says nothing about the dead one."""
    assert len({ReadLeases().take().number for _ in range(8)}) > 1


HOLDER = """
import sys
from kv_transfer.transports.in_place.read_leases import ReadLeases
leases = ReadLeases()
lease = leases.take()
print(leases.file.fd, lease.slot, lease.number, flush=True)
sys.stdin.read()
"""


def test_a_process_that_died_holds_nothing() -> None:
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            fd, slot, number = map(int, holder.stdout.readline().split())
            file = ReadLeasesFile(holder.pid, fd)
            assert file.is_held(slot, number)
            assert not file.is_held(slot, number + 1)
            holder.kill()
            # Its parent has not asked yet how it ended.
            os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
            with pytest.raises(OSError):
                file.is_held(slot, number)
        finally:
            holder.kill()

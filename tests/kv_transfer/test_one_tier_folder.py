"""Two nodes that were given one folder: the second is refused by name, whichever it is, and nothing
that a killed one leaves is ever a wrong block."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tier_owner import IDENTITY, NUM_NAMES, content, name_of, take, write

from kv_transfer.memory.pool import slot_memory
from kv_transfer.memory.pool.block_files import BlockFiles
from kv_transfer.memory.pool.slot_memory import SlotMemory, TierUnavailable

_OWNER = Path(__file__).with_name("tier_owner.py")


@contextmanager
def other_node(folder: Path, seconds: float = 0.0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts a node's process. Gives it with what it says; it is killed at the end."""
    with subprocess.Popen(
        [sys.executable, str(_OWNER), str(folder), str(seconds)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_memory, "_LOCK_TIMEOUT_S", 0.0)


def check(memory: SlotMemory, files: BlockFiles) -> int:
    """Compares all that is here with what its names say. Returns how many blocks that is."""
    stored = memory.contents()
    for slot, name in stored.items():
        if memory.checksums(slot) == memory.known_checksums(slot):
            assert np.array_equal(memory.slot(slot), content(name)), "a wrong block"
    names = files.scan()
    assert set(names) <= {name_of(i) for i in range(NUM_NAMES)}
    for name in names:
        assert files.read(name, 0), "what was scanned is whole"
        assert np.array_equal(memory.slot(0), content(name)), "a wrong block"
    return len(names)


def test_the_second_is_refused_by_name_and_the_first_goes_on(tmp_path: Path) -> None:
    with other_node(tmp_path) as (process, said):
        assert said == "mine"
        with pytest.raises(TierUnavailable, match=r"in use by another node; give each node"):
            take(tmp_path)
        assert process.poll() is None, "the first one works on"
        with other_node(tmp_path) as (_, refused):
            assert "in use by another node" in refused


def test_the_other_way_round_and_a_refused_one_that_dies_takes_nothing_along(
    tmp_path: Path,
) -> None:
    memory, files = take(tmp_path)
    write(memory, files, 3)
    for _ in range(2):
        with other_node(tmp_path, 0.2) as (process, said):
            assert "in use by another node" in said
            process.kill()
    write(memory, files, 4)
    assert check(memory, files) == 2
    memory.close()
    files.close()
    with other_node(tmp_path) as (_, said):
        assert said == "mine"


def test_another_model_in_the_same_folder_is_refused_as_long_as_the_first_lives(
    tmp_path: Path,
) -> None:
    with other_node(tmp_path) as (_, said):
        assert said == "mine"
        with pytest.raises(TierUnavailable, match="in use by another node"):
            take(tmp_path, b"x" * 32)
    memory, files = take(tmp_path, b"x" * 32)
    assert memory.contents() == {} and files.scan() == [], "nothing of the other model is found"
    memory.close()
    files.close()


def test_whatever_a_killed_node_was_writing_no_block_is_wrong(tmp_path: Path) -> None:
    """One node after the other is killed while it writes; the next finds what was whole."""
    draw, num_found = random.Random(1), 0
    for _ in range(4):
        with other_node(tmp_path, 10.0) as (process, said):
            assert said == "mine"
            while len(list((tmp_path / IDENTITY.hex()[:16]).glob("??/*.kv"))) < 2:
                assert process.poll() is None
            for _ in range(draw.randrange(20_000)):
                pass
            process.kill()
            process.wait()
        memory, files = take(tmp_path)
        num_found += check(memory, files)
        memory.close()
        files.close()
    assert num_found > 4

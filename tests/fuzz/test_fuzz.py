"""Fuzzing keeps what it promises: a fault is found, made small and kept; limits hold."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.fuzz.child import Trial, draw, find
from tests.fuzz.damage import packed, unpacked
from tests.fuzz.limits import Limits
from tests.fuzz.shrink import shrunk
from tests.fuzz.target import Fault, Target, judged
from tests.fuzz.targets import MODULES


def target(check: Callable[[bytes], None], **limits: float) -> Target:
    return Target(name="planted", inputs=st.binary(max_size=40), check=check, **limits)  # type: ignore[arg-type]


def trial(tmp_path: Path, check: Callable[[bytes], None], **limits: float) -> Trial:
    planted = target(check, **limits)
    return Trial(planted, Limits(planted, tmp_path / "current"))


def refuse_sevens(data: bytes) -> None:
    if 7 in data:
        raise KeyError("seven")


def test_a_fault_is_found_and_written_as_small_as_it_gets(tmp_path: Path) -> None:
    tried = trial(tmp_path, refuse_sevens)
    with pytest.raises(KeyError):
        draw(target(refuse_sevens), 500, 1, tried)
    path = tried.write_failure(tmp_path / "failures")
    assert path.read_bytes() == b"\x07"
    assert "KeyError: 'seven'" in path.with_suffix(".txt").read_text()
    assert (tmp_path / "current").read_bytes() == b"\x07", "a process that died would have left it"


def test_the_same_seed_draws_the_same_inputs() -> None:
    def drawn(seed: int) -> list[bytes]:
        found: list[bytes] = []
        draw(target(found.append), 50, seed, found.append)
        return found

    assert drawn(3) == drawn(3) != drawn(4)


def test_what_ends_the_process_is_made_smaller_in_forks() -> None:
    def die(data: bytes) -> None:
        if b"xyz" in data:
            os.kill(os.getpid(), signal.SIGKILL)

    assert shrunk(b"a" * 100 + b"xyz" + b"b" * 100, die) == b"xyz"
    assert shrunk(b"harmless", die) == b"harmless"


def test_an_input_that_takes_long_is_a_fault(tmp_path: Path) -> None:
    def compute(data: bytes) -> None:
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass

    with pytest.raises(Fault, match="processor time"):
        trial(tmp_path, compute, max_s=0.01)(b"")


def test_an_input_that_takes_memory_is_a_fault(tmp_path: Path) -> None:
    def grow(data: bytes) -> None:
        # Far more than what tests before may give back meanwhile.
        assert b"x" * (256 << 20)

    with pytest.raises(Fault, match="grew by"):
        trial(tmp_path, grow, max_bytes=16 << 20)(b"")


@pytest.mark.parametrize("said", ["", "word", "two\nlines", "bell \x07", "x " * 5000])
def test_an_error_without_a_sentence_is_a_fault(said: str) -> None:
    def fail() -> None:
        raise ValueError(said)

    with pytest.raises(Fault, match="no sentence"):
        judged(fail, ValueError)
    with pytest.raises(ValueError):
        judged(fail, KeyError)


def test_files_of_an_input_come_back() -> None:
    parts = [("a.json", b"{}"), ("b", b"")]
    assert unpacked(packed(*parts)) == parts
    assert unpacked(b"\xff" * 9) == [("\xff\xff\xff", b"")]


@pytest.mark.parametrize("name", ["key_files", "http2_headers", "safetensors"])
def test_a_target_takes_what_it_draws(tmp_path: Path, name: str) -> None:
    found = find(name)
    tried = Trial(found, Limits(found, tmp_path / "current"))
    draw(found, 20, 0, tried)
    assert tried.num_tried >= 20 and tried.num_left == 0


def test_every_target_is_there() -> None:
    assert [find(name).name for name in MODULES] == list(MODULES)

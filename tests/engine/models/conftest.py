"""Checkpoints of every family, computed once by transformers and once by tandem with one rank and
with two."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cli.local_cluster.cluster import free_ports
from engine.parallel.distributed import ParallelGroup
from tests.engine.models.engine_rank import MODES_OF_SIZE, greedy_all
from tests.engine.models.int8_checkpoints import MakePair, write_pair
from tests.engine.models.rank_process import compute_all
from tests.engine.models.reference_models import FAMILIES, save_checkpoint

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 280


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Checkpoints(type(Path())):  # type: ignore[misc]
    """A folder with one checkpoint for each family, which is written when it is first named: most
    processes that run tests need a few. Others are written by those who name them."""

    def __truediv__(self, family: Any) -> Path:
        self._write(family)
        return Path(self, family)

    def with_all(self) -> Path:
        """Returns the folder, with every family in it."""
        for family in FAMILIES:
            self._write(family)
        return Path(self)

    def _write(self, family: str) -> None:
        if family in FAMILIES and not Path(self, family).exists():
            # What tests draw does not depend on who was first.
            with torch.random.fork_rng(devices=[]):
                save_checkpoint(FAMILIES[family], Path(self, family))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def make_int8_pair(checkpoints: Path, tmp_path: Path) -> MakePair:
    """Returns what writes a family in a layout of integers, and plain with the same meaning."""
    return partial(write_pair, checkpoints, tmp_path)


@pytest.fixture(scope="session")
def logits_by_rank(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[dict[str, torch.Tensor]]]:
    """Maps tensor-parallel size to what each rank computed."""
    folder, out = checkpoints.with_all(), tmp_path_factory.mktemp("logits")
    with ranks_running("tests.engine.models.rank_process", 2, str(folder), str(out)):
        alone = compute_all(folder, ParallelGroup(0, 1))
    pair = [load_file(out / f"rank-{rank}.safetensors") for rank in range(2)]
    return {1: [alone], 2: pair}


@pytest.fixture(scope="session")
def greedy_by_rank(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[dict[str, Any]]]:
    """Maps tensor-parallel size to what each rank of an engine sampled: "family/mode/request" to
    the fields of `Found`.
    """
    folder, out = checkpoints.with_all(), tmp_path_factory.mktemp("greedy")
    num_engines = {size: len(FAMILIES) * len(modes) for size, modes in MODES_OF_SIZE.items()}
    with ranks_running(
        "tests.engine.models.engine_rank", 2, str(folder), str(out), num_groups=num_engines[2]
    ):
        alone = greedy_all(folder, 0, 1, [""] * num_engines[1])
    pair = [json.loads((out / f"greedy-{rank}.json").read_text()) for rank in range(2)]
    return {1: [alone], 2: pair}


@contextmanager
def ranks_running(module: str, size: int, *args: str, num_groups: int = 1) -> Iterator[None]:
    """Runs `module ARGS RANK SIZE RENDEZVOUS...` for all ranks, and waits for them in the end: they
    often wait for each other, so that the caller has something to do meanwhile."""
    rendezvous = [f"127.0.0.1:{port}" for port in free_ports(num_groups)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *args, str(rank), str(size), *rendezvous], cwd=ROOT
        )
        for rank in range(size)
    ]
    try:
        yield
        codes = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * size

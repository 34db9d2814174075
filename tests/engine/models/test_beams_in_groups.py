"""Beam searches over data-parallel groups and pipeline stages: the answers of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import ParallelConfig
from engine.sched.groups.group_scheduler import GroupScheduler
from tests.engine.kv_groups.grouped_node import run_until
from tests.engine.models.reference_models import FAMILIES, save_checkpoint
from tests.engine.models.test_beam_search import BEAMS, PROMPTS, asked, expected
from tests.engine.models.test_data_parallel import node_of

CASES = [(number, beam, 2) for number in range(len(PROMPTS)) for beam in BEAMS[:3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beams") / "llama"
    save_checkpoint(FAMILIES["llama"], folder)
    return folder


@pytest.mark.parametrize(
    ("parallel", "rows"),
    [
        (ParallelConfig(data_parallel_size=2), 3),
        (ParallelConfig(data_parallel_size=2), 10),
        (ParallelConfig(tensor_parallel_size=2), 10),
        (ParallelConfig(pipeline_parallel_size=2), 10),
    ],
    ids=["groups with few rows", "groups", "ranks", "stages"],
)
def test_beams_are_those_of_one_rank(folder: Path, parallel: ParallelConfig, rows: int) -> None:
    """Both groups search, and sampled choices beside them leave nothing behind either."""
    with node_of(folder, parallel, rows=rows) as node:
        names = []
        for index, (number, beam, n) in enumerate(CASES):
            message = asked(f"b{index}", PROMPTS[number], beam, n)
            names += message.choice_ids
            node.tokens |= {name: [] for name in message.choice_ids}
            node.core.handle(message)
        node.add("c", PROMPTS[1], 6, num_choices=3)
        names += [f"c.{i}" for i in range(3)]
        run_until([node], lambda: node.ended.issuperset(names))
        for index, (number, beam, n) in enumerate(CASES):
            found = [node.tokens[f"b{index}.{i}"] for i in range(n)]
            assert found == expected(folder, number, beam, n)
        if isinstance(scheduler := node.core.scheduler, GroupScheduler):
            assert all(group.stats().num_steps > 12 for group in scheduler.groups)
        run_until([node], lambda: node.core.is_idle)
        node.check_empty()

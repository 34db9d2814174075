"""Places the experts of one rank by observed load while steps run (EPLB).

    step            what happens in front of it, on all ranks alike
    n * I - W       routers begin to count tokens anew (I: step_interval, W: window_size)
    n * I           counts of all ranks are gathered
    n * I + 1 ...   one layer a step: each rank makes the same plan for it, weights are exchanged,
                    and its router's table is overwritten

Steps are numbered by the scheduler, and a rank that misses one ends: so ranks agree on when to
exchange by the number of the step alone. A layer is where it was or where it is planned to be,
never in between.
"""

from __future__ import annotations

import logging
from collections import deque

import torch
from msgspec import structs
from torch import nn

from engine.config import EngineConfig
from engine.contracts.outputs import ExpertStats
from engine.eplb_config import EplbConfig
from engine.expert_placement import (
    Placement,
    expected_loads,
    initial_placement,
    loads_of_experts,
    plan_placement,
)
from engine.layers.feed_forward.expert_share import turns_of_copies
from engine.layers.feed_forward.sparse_mlp import SparseMLP
from engine.parallel.distributed import ParallelGroup
from engine.parallel.place import ParallelPlace
from engine.worker.experts.mover import ExpertMover

logger = logging.getLogger(__name__)


class ExpertBalancer:
    """Owns the counts and the placement of all layers. `before_step` in front of each step."""

    def __init__(self, config: EplbConfig, blocks: list[SparseMLP], group: ParallelGroup) -> None:
        self._config = config
        self._blocks, self._group = blocks, group
        sizes = blocks[0].experts.sizes
        placement = initial_placement(sizes.total, config.num_redundant_experts, group.size)
        self.placements: list[Placement] = [placement] * len(blocks)
        self._pending: deque[tuple[int, list[list[int]]]] = deque()
        """Layers that are to be planned, with the counts of all ranks' slots."""
        self._mean = self._planned = 0.0
        """Sums over layers: the mean load of ranks, and the highest with what was planned."""
        self._num_changed = 0
        """Layers that were placed anew since the counts were gathered."""
        device = blocks[0].router.weight.device
        self._loads = torch.zeros((len(blocks), sizes.count), dtype=torch.int64, device=device)
        for block, loads in zip(blocks, self._loads, strict=True):
            block.router.loads = loads
        self._mover = ExpertMover(blocks[0].experts, group)
        self.stats = ExpertStats()

    def begin(self) -> None:
        """Forgets what was counted before anything asked for something, and connects all ranks:
        libraries do that with the first call, and a step would wait for it."""
        self._loads.zero_()
        one_each = [1] * self._group.size
        numbers = self._loads.new_zeros(self._group.size)
        self._group.exchange_rows(numbers, one_each, torch.empty_like(numbers), one_each)
        self._group.gather_rows(numbers)

    def before_step(self, step_id: int) -> None:
        """Does what is due. A collective: all ranks call it with the same numbers."""
        interval, window = self._config.step_interval, self._config.window_size
        if self._pending:
            self._rearrange(*self._pending.popleft())
        if step_id % interval == 0 and not self._pending:
            self._gather()
        if (step_id + window) % interval == 0:
            self._loads.zero_()

    def _gather(self) -> None:
        of_ranks = self._group.gather_rows(self._loads).cpu()
        by_layer = of_ranks.view(self._group.size, *self._loads.shape).transpose(0, 1).tolist()
        totals = [[sum(counts) for counts in of_slots] for of_slots in by_layer]
        highest = sum(map(max, totals))
        if highest == 0:
            return
        self._mean = sum(map(sum, totals)) / self._group.size
        self._planned, self._num_changed = 0.0, 0
        self._pending.extend(enumerate(by_layer))
        self.stats = structs.replace(self.stats, balancedness=self._mean / highest)

    def _rearrange(self, layer: int, of_slots: list[list[int]]) -> None:
        current, stats = self.placements[layer], self.stats
        loads = loads_of_experts(current, of_slots)
        planned = plan_placement(loads, current)
        self._planned += max(expected_loads(planned, loads))
        if planned is not current:
            num_moved = self._move(layer, planned)
            stats = structs.replace(
                stats,
                num_rearrangements=stats.num_rearrangements + (self._num_changed == 0),
                num_moved=stats.num_moved + num_moved,
            )
            self._num_changed += 1
        if not self._pending:
            stats = structs.replace(stats, planned_balancedness=self._mean / self._planned)
            self._log(stats)
        self.stats = stats

    def _move(self, layer: int, planned: Placement) -> int:
        """Returns how many experts ranks have got."""
        block = self._blocks[layer]
        num_moved = self._mover.move(block.experts, self.placements[layer], planned)
        table = block.router.own_numbers
        assert table is not None
        table.copy_(turns_of_copies(planned, table.shape[1], self._group.rank))
        self.placements[layer] = planned
        self._loads[layer].zero_()
        return num_moved

    def _log(self, stats: ExpertStats) -> None:
        if self._config.log_balancedness and self._group.rank == 0:
            logger.info(
                "experts: mean / highest load of ranks was %.3f in the last steps; %d of %d layers "
                "were placed anew, for %.3f",
                stats.balancedness,
                self._num_changed,
                len(self._blocks),
                stats.planned_balancedness,
            )


def create_balancer(
    config: EngineConfig, place: ParallelPlace, model: nn.Module
) -> ExpertBalancer | None:
    """Returns what balances the experts of a loaded model; None: they stay where they are."""
    if config.parallel.eplb is None or place.movers is None:
        return None
    blocks = [block for block in model.modules() if isinstance(block, SparseMLP)]
    return ExpertBalancer(config.parallel.eplb, blocks, place.movers)

"""Places the experts of one rank by observed load while steps run (EPLB).

    step            what happens in front of it, on all ranks alike
    n * I - W       routers begin to count tokens anew (I: step_interval, W: window_size)
    n * I           counts of all ranks are gathered; each rank makes the same plan
    n * I + 1 ...   one layer a step: weights are exchanged, then its routers' table is overwritten

Steps are numbered by the scheduler, and a rank that misses one ends: so ranks agree on when to
exchange by the number of the step alone. A layer is where it was or where it is planned to be,
never in between.
"""

from __future__ import annotations

import logging
from collections import deque

import torch
from torch import nn

from engine.config import EngineConfig
from engine.distributed import ParallelGroup
from engine.eplb_config import EplbConfig
from engine.expert_placement import (
    Placement,
    expected_loads,
    initial_placement,
    loads_of_experts,
    plan_placement,
)
from engine.layers.expert_share import turns_of_copies
from engine.layers.sparse_mlp import SparseMLP
from engine.outputs import ExpertStats
from engine.parallel import ParallelPlace
from engine.worker.expert_mover import ExpertMover

logger = logging.getLogger(__name__)


class ExpertBalancer:
    """Owns the counts and the placement of all layers. `before_step` in front of each step."""

    def __init__(self, config: EplbConfig, blocks: list[SparseMLP], group: ParallelGroup) -> None:
        self._config = config
        self._blocks, self._group = blocks, group
        sizes = blocks[0].experts.sizes
        placement = initial_placement(sizes.total, config.num_redundant_experts, group.size)
        self.placements: list[Placement] = [placement] * len(blocks)
        self._pending: deque[tuple[int, Placement]] = deque()
        """Layers that are to change, and how."""
        device = blocks[0].router.weight.device
        self._loads = torch.zeros((len(blocks), sizes.count), dtype=torch.int64, device=device)
        for block, loads in zip(blocks, self._loads, strict=True):
            block.router.loads = loads
        self._mover = ExpertMover(blocks[0].experts, group)
        self.stats = ExpertStats()

    def begin(self) -> None:
        """Forgets what was counted before anybody asked for something."""
        self._loads.zero_()

    def before_step(self, step_id: int) -> None:
        """Does what is due. A collective: all ranks call it with the same numbers."""
        interval, window = self._config.step_interval, self._config.window_size
        if self._pending:
            self._rearrange(*self._pending.popleft())
        if step_id % interval == 0 and not self._pending:
            self._plan()
        if (step_id + window) % interval == 0:
            self._loads.zero_()

    def _plan(self) -> None:
        of_ranks = self._group.gather_rows(self._loads).cpu()
        by_layer = of_ranks.view(self._group.size, *self._loads.shape).transpose(0, 1).tolist()
        means, highest = 0.0, 0.0
        after = 0.0
        for layer, of_slots in enumerate(by_layer):
            loads = loads_of_experts(self.placements[layer], of_slots)
            planned = plan_placement(loads, self.placements[layer])
            if planned is not self.placements[layer]:
                self._pending.append((layer, planned))
            means += sum(loads) / len(of_slots)
            highest += max(map(sum, of_slots))
            after += max(expected_loads(planned, loads))
        if highest == 0:
            return
        self.stats = ExpertStats(
            means / highest,
            means / after,
            self.stats.num_rearrangements + bool(self._pending),
            self.stats.num_moved,
        )
        if self._config.log_balancedness and self._group.rank == 0:
            logger.info(
                "experts: mean / highest load of ranks was %.3f in the last steps; %d of %d layers "
                "are placed anew, for %.3f",
                self.stats.balancedness,
                len(self._pending),
                len(self._blocks),
                self.stats.planned_balancedness,
            )

    def _rearrange(self, layer: int, planned: Placement) -> None:
        block = self._blocks[layer]
        num_moved = self._mover.move(block.experts, self.placements[layer], planned)
        table = block.router.own_numbers
        assert table is not None
        table.copy_(turns_of_copies(planned, table.shape[1], self._group.rank))
        self.placements[layer] = planned
        self._loads[layer].zero_()
        was = self.stats
        self.stats = ExpertStats(
            was.balancedness,
            was.planned_balancedness,
            was.num_rearrangements,
            was.num_moved + num_moved,
        )


def create_balancer(
    config: EngineConfig, place: ParallelPlace, model: nn.Module
) -> ExpertBalancer | None:
    """Returns what balances the experts of a loaded model; None: they stay where they are."""
    if config.parallel.eplb is None or place.movers is None:
        return None
    blocks = [block for block in model.modules() if isinstance(block, SparseMLP)]
    return ExpertBalancer(config.parallel.eplb, blocks, place.movers)

"""An `ExpertPlan` says how the GEMMs of a step's experts run, whatever the format of the weights:
which tiles each computes, and how both find their rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tandem_kernels.device import gpu_name
from tandem_kernels.experts.expert_rows import ExpertRows
from tandem_kernels.experts.expert_tuning import (
    MAX_SEARCHED_PAIRS,
    ExpertShape,
    ExpertTuning,
    gemm_tunings,
    searched_pairs,
)


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Says how both GEMMs of a step run.

    Attributes:
        gate_up, down: The tiles of each.
        rows: How their programs find the rows of an expert.
    """

    gate_up: ExpertTuning
    down: ExpertTuning
    rows: ExpertRows

    @classmethod
    def of(
        cls,
        experts: Tensor,
        shape: ExpertShape,
        fixed: ExpertTuning | None = None,
        ranks: int = 1,
    ) -> ExpertPlan:
        """Chooses tiles, and sorts the pairs if there are too many to search.

        Args:
            experts: [T, k] int32; -1: none.
            fixed: The tiles of both GEMMs; None: as the number of pairs asks.
            ranks: As many have experts of the layer, as a whole: of all pairs, this one has its
                part on average.
        """
        if fixed is not None:
            gate_up = down = fixed
        else:
            gate_up, down = gemm_tunings(shape, experts.numel() / ranks, gpu_name(experts.device))
        searched = searched_pairs(shape.weights)
        if gate_up.each_pair and down.each_pair:
            # No program looks for rows, unless there are too few counters.
            searched = MAX_SEARCHED_PAIRS
        return cls(gate_up, down, ExpertRows.of(experts, shape.num_experts, searched))

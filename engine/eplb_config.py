"""How experts are balanced over ranks by observed load (EPLB), under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EplbConfig:
    """Says when experts are placed anew, and how many copies there may be.

    Attributes:
        window_size: The last steps before a placement, whose tokens count for it.
        step_interval: Experts are placed anew after this many steps.
        num_redundant_experts: Slots of each layer, on all ranks together, beyond one for each
            expert: the busiest experts have copies in them.
        log_balancedness: Each placement writes a line to the log.
    """

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0
    log_balancedness: bool = False

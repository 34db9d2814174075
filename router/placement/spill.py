"""Decides when a session leaves its home: only for a gain that is worth its cached prefix.

    stay while    cost(home) ≤ (1 + ratio) · cost(best) + services · mean service time

The bound is in seconds saved, not in a ratio of loads: with few long prompts on each node a ratio
says little. Without a margin everybody runs after the same idle node on loads that are a moment
old. A first turn has nothing at home yet and moves more easily than a later one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Margin:
    ratio: float
    services: float

    def keeps(self, home_s: float, best_s: float, mean_service_s: float) -> bool:
        """Returns whether home may cost `home_s` when the best node costs `best_s`."""
        return home_s <= (1 + self.ratio) * best_s + self.services * mean_service_s


@dataclass(frozen=True, slots=True)
class SpillRule:
    first_turn: Margin
    later_turn: Margin

    def margin(self, *, is_later_turn: bool) -> Margin:
        return self.later_turn if is_later_turn else self.first_turn


MARGINS = SpillRule(first_turn=Margin(0.1, 0.1), later_turn=Margin(0.25, 0.25))
"""The value that did best in simulation (docs/routing.md)."""

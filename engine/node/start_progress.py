"""Says how far a node is on its way to serving, which its probes answer meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.messages import LoadProgress


@dataclass(slots=True)
class StartProgress:
    """Attributes:
    stage: What the node does now; empty: it has not come to its engine.
    fraction: How far it is with that, in 0..1.
    """

    stage: str = ""
    fraction: float = 0.0

    def note(self, progress: LoadProgress) -> None:
        self.stage, self.fraction = progress.stage, progress.fraction

    def __str__(self) -> str:
        if not self.stage:
            return "starting: the model's configuration is read"
        return f"starting: {self.stage.replace('_', ' ')}, {self.fraction:.0%}"

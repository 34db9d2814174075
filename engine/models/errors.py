"""Faults of a checkpoint folder."""

from __future__ import annotations

from pathlib import Path

from engine.contracts.errors import CannotStartError


class CheckpointError(CannotStartError):
    """A checkpoint cannot be served. The message names the path, the fault and the cure."""

    def __init__(self, path: Path | str, fault: str, cure: str) -> None:
        super().__init__(f"{path}: {fault}; {cure}")
        self.path = str(path)
        self.fault = fault
        self.cure = cure

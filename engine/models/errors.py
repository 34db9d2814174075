"""Faults of a checkpoint folder."""

from __future__ import annotations

from pathlib import Path

from edge.printable import printable
from engine.contracts.errors import CannotStartError


class CheckpointError(CannotStartError):
    """A checkpoint cannot be served. The message names the path, the fault and the cure."""

    def __init__(self, path: Path | str, fault: str, cure: str) -> None:
        fault = printable(fault)
        super().__init__(f"{printable(str(path))}: {fault}; {cure}")
        self.path = str(path)
        self.fault = fault
        self.cure = cure

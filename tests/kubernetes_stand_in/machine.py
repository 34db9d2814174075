"""Describes what a kubelet knows of the machine and cluster that its pods live in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Describes the machine. `api_env`: where pods find the API. `ca`: PEM of the authority behind
    its certificate.
    """

    folder: Path
    has_dns: bool = False
    api_env: dict[str, str] = field(default_factory=dict)
    ca: str = ""

    @property
    def claims(self) -> Path:
        """Returns the persistent volumes, which outlive pods."""
        return self.folder / "claims"

"""A worker process that knows the tests' model."""

from __future__ import annotations

from engine.executor import worker_proc
from tests.engine.kv_groups.grouped_model import registered


def main() -> None:
    """Runs a worker."""
    with registered():
        worker_proc.main()

"""A worker process that knows the tests' model."""

from __future__ import annotations

from engine.executor import worker_proc
from tests.engine.kv_groups.grouped_model import register


def main() -> None:
    """Runs a worker."""
    register()
    worker_proc.main()

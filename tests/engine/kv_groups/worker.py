"""A worker process that knows the tests' model."""

from __future__ import annotations

from engine.executor.worker_proc import main
from tests.engine.kv_groups.grouped_model import register

if __name__ == "__main__":
    register()
    main()

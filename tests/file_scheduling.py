"""Which tests run at the same time, where pytest-xdist spreads them (`make test`).

    worker 1   clusters: every file that starts whole clusters, one after the other | files
    others     file | file | file | ...                                             | files

A cluster has a dozen processes, so two of them at once would take each other's time; most of the
other tests compute in one process. A file is never cut: its fixtures are made once.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parent.parent
CLUSTERS = "clusters"


class FileScheduling(LoadScopeScheduling):
    """All files with tests that are marked `e2e` are one piece of work; every other file is one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return CLUSTERS if starts_clusters(ROOT / file) else file


@cache
def starts_clusters(file: Path) -> bool:
    return "pytest.mark.e2e" in file.read_text(encoding="utf-8")

"""Which tests run at the same time, where pytest-xdist spreads them (`make test`).

    worker 1   clusters: every file that starts whole clusters, one after the other | files
    others     file | file | file | ...                                             | files

A cluster has a dozen processes, so two of them at once would take each other's time; most of the
other tests compute in one process. A file is never cut: its fixtures are made once. Files that
compare with the same answers of transformers are one piece as well, so that these are made once.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parent.parent
CLUSTERS = "clusters"
TOGETHER = {
    "tests/engine/models/test_logit_parity.py": "tests/engine/models/test_greedy_parity.py",
}
"""A file to the one whose piece of work it belongs to."""


class FileScheduling(LoadScopeScheduling):
    """All files with tests that are marked `e2e` are one piece of work; every other file is one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return CLUSTERS if starts_clusters(ROOT / file) else TOGETHER.get(file, file)


@cache
def starts_clusters(file: Path) -> bool:
    return "pytest.mark.e2e" in file.read_text(encoding="utf-8")

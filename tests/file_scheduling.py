"""Which tests run at the same time, where pytest-xdist spreads them (`make test`).

    worker 1   clusters: every file that starts whole clusters, one after the other | files
    worker 2   file | file | file | ...                                             | files

A cluster has a dozen processes, so two of them at once would take each other's time; most of the
other tests compute in one process. A file is never cut: its fixtures are made once.
"""

from __future__ import annotations

from xdist.scheduler import LoadGroupScheduling


class FileScheduling(LoadGroupScheduling):
    """By group where a test has one, else by file. The first test's group is handed out first."""

    def _split_scope(self, nodeid: str) -> str:
        scope = super()._split_scope(nodeid)
        return str(scope).partition("::")[0]

"""Which tests run at the same time, where pytest-xdist spreads them (`make test`).

    worker 1   clusters: every file that starts whole clusters, one after the other | files
    others     file | file | file | ...                                             | files

A cluster has a dozen processes, so two of them at once would take each other's time; most of the
other tests compute in one process. The longest files come first, so that short ones are left where
the others have nothing more to do. The rest comes in an order that mixes folders: files of one
folder wait, or compute, alike, and where all workers wait at once, processors idle. A file is never
cut: its fixtures are made once. Files that compare with the same answers of transformers are one
piece as well, so that these are made once.
"""

from __future__ import annotations

import zlib
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parent.parent
CLUSTERS = "clusters"
TOGETHER = {
    "tests/engine/models/test_logit_parity.py": "tests/engine/models/test_greedy_parity.py",
}
"""A file to the one whose piece of work it belongs to."""
LONG = [
    "tests/kernels/test_kernels_compile.py",
    "tests/kernels/test_triton_without_gpu.py",
    "tests/engine/models/test_greedy_parity.py",
    "tests/engine/models/test_hybrid_node.py",
    "tests/engine/models/test_pd_parity.py",
    "tests/helm/test_mistakes.py",
    "tests/engine/sched/test_kv_groups.py",
    "tests/test_structure.py",
    "tests/engine/sched/test_state_groups.py",
    "tests/decode_node/grammar/test_public_schemas.py",
    "tests/security/test_floods.py",
    "tests/router/test_faults.py",
    "tests/router/test_fuzz.py",
    "tests/cli/test_plain_installation.py",
    "tests/release/test_release.py",
    "tests/engine/kv_groups/test_grouped_model.py",
    "tests/engine/core/test_host_memory.py",
    "tests/engine/lora/test_adapted_engine.py",
    "tests/engine/worker/test_choices.py",
    "tests/engine/models/test_sharded_sampling.py",
    "tests/decode_node/parsers/test_any_tokens.py",
]
"""Files of more than ten seconds, or of fewer that would be among the last."""


class FileScheduling(LoadScopeScheduling):
    """All files with tests that are marked `e2e` are one piece of work; every other file is one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return CLUSTERS if starts_clusters(ROOT / file) else TOGETHER.get(file, file)


@cache
def turn(file: Path) -> int:
    """Returns a number that is lower the earlier a file has to begin."""
    name = str(file.resolve().relative_to(ROOT))
    if starts_clusters(file):
        return 0
    return 1 + LONG.index(name) if name in LONG else 1 + len(LONG) + zlib.crc32(name.encode())


@cache
def starts_clusters(file: Path) -> bool:
    return "pytest.mark.e2e" in file.read_text(encoding="utf-8")

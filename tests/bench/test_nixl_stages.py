"""A stage that hangs ends its process, which says where it stood."""

from __future__ import annotations

import subprocess
import sys

_HANGS = """
import time
from bench.kv.nixl_stages import Place, Watch
with Watch(Place("reader", 1, 60.0)).stage("connect"):
    pass
with Watch(Place("reader", 1, 0.1)).stage("first word"):
    time.sleep(600)
"""


def test_a_stage_that_hangs_is_named() -> None:
    found = subprocess.run([sys.executable, "-c", _HANGS], capture_output=True, text=True)
    assert found.returncode == 3
    assert "connect took" in found.stderr
    assert "reader, own memory: STUCK: first word" in found.stderr
    assert 'File "<string>", line 7' in found.stderr, "the stacks say what it was doing"

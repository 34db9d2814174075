"""Workers of pytest-xdist are forks where they can be, and run what execnet sends either way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked_programs, forked_workers

MAIN = """
import subprocess, sys
from pathlib import Path
from tests import forked_workers
forked_workers.ROOT = Path(sys.argv[1])
forked_workers.install()
PIPE = subprocess.PIPE
with subprocess.Popen(forked_workers.COMMAND, stdin=PIPE, stdout=PIPE, text=True) as worker:
    print(*worker.communicate(repr(sys.argv[2]) + chr(10)), worker.wait())
"""
SENT = """
import atexit, os, sys, threading
found = "tests.test_of_its_own" in sys.modules, "import_order" in sys.modules
atexit.register(print, *found, threading.active_count())
"""


@pytest.mark.skipif(not forked_programs.CAN_FORK, reason="forks are no children of who asks")
@pytest.mark.parametrize("threads", [0, 1])
def test_a_worker_has_imported_all_or_starts_anew(threads: int, tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "conftest.py").write_text(f"import sys; sys.path.insert(0, {str(folder)!r})")
    (folder / "import_order.py").touch()
    starts = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    (folder / "test_of_its_own.py").write_text(f"import import_order\n{starts * threads}")
    (folder / "test_that_is_broken.py").write_text("import nothing_of_this_name")
    skipped = "import pytest; pytest.importorskip('nothing_of_this_name')"
    (folder / "test_that_is_skipped.py").write_text(skipped)
    paths = os.pathsep.join([str(tmp_path), str(forked_workers.ROOT)])
    found = subprocess.run(
        [sys.executable, "-c", MAIN, str(tmp_path), SENT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    is_fork = not threads
    assert found.stdout.split() == [str(is_fork), str(is_fork), "1", "None", "0"], found.stderr
    assert ("imports have started threads" in found.stderr) == (threads > 0)

"""Children end with the code that their main() says, and what they wrote is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(tmp_path: Path, source: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "of_a_child.py").write_text(source)
    return subprocess.run(
        [sys.executable, "-m", "edge.program", "of_a_child"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        ("return None", 0, ""),
        ("return 3", 3, ""),
        ("raise SystemExit(4)", 4, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit('the parent is gone')", 1, "the parent is gone\n"),
        ("raise ValueError('no such rank')", 1, "ValueError: no such rank\n"),
    ],
)
def test_a_child_ends_as_its_main_says(tmp_path: Path, ending: str, code: int, told: str) -> None:
    done = run(tmp_path, f"def main():\n    print('last words', end='')\n    {ending}\n")
    assert (done.returncode, done.stdout) == (code, "last words")
    assert done.stderr.endswith(told) and bool(done.stderr) == bool(told)


def test_a_module_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, "import no_such_module\n")
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stderr


def test_imports_are_never_walked_again_and_garbage_is_collected(tmp_path: Path) -> None:
    source = "import gc\ndef main():\n    print(gc.isenabled(), gc.get_freeze_count() > 5_000)\n"
    assert run(tmp_path, source).stdout == "True True\n"


def test_no_collection_but_rare_ones_looks_at_much(tmp_path: Path) -> None:
    """Thousands of requests that begin together leave objects that last, of which each is looked at
    once more. All streams stand still meanwhile."""
    source = (
        "import gc\n"
        "from edge.program import settle\n"
        "def main():\n"
        "    looked_at = []\n"
        "    def note(phase, info):\n"
        "        if phase == 'start' and info['generation'] < 2:\n"
        "            looked_at.append(sum(len(gc.get_objects(i)) for i in (0, 1)))\n"
        "    settle()\n"
        "    gc.callbacks.append(note)\n"
        "    kept = [[] for _ in range(200_000)]\n"
        "    print(len(looked_at) > 1000, max(looked_at))\n"
    )
    many, most = run(tmp_path, source).stdout.split()
    assert many == "True" and int(most) < 2000


def test_no_thread_or_handler_holds_up_the_end(tmp_path: Path) -> None:
    source = (
        "import atexit, threading, time\n"
        "def main():\n"
        "    threading.Thread(target=time.sleep, args=[1000]).start()\n"
        "    atexit.register(time.sleep, 1000)\n"
    )
    assert run(tmp_path, source).returncode == 0


def test_a_program_may_open_as_many_files_as_the_host_allows(tmp_path: Path) -> None:
    """systemd and shells begin with 1024: a router had room for 500 streams."""
    (tmp_path / "of_a_child.py").write_text(
        "from edge.program import file_limit\ndef main():\n    print(file_limit())\n"
    )
    command = f"ulimit -Sn 300; ulimit -Hn 4000; exec {sys.executable} -m edge.program of_a_child"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == "4000\n", done.stderr

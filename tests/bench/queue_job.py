"""A job for the tests of the queue: `python -m tests.bench.queue_job WHAT FILES`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_WAIT_FOR_EVER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


def hang(pids: Path) -> None:
    """Tells its process and two more, one of them in a group of its own, and ignores SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deaf = [sys.executable, "-c", f"{_WAIT_FOR_EVER}print(flush=True); time.sleep(3600)"]
    children = [
        subprocess.Popen(deaf, stdout=subprocess.PIPE, process_group=group)
        for group in (os.getpgid(0), 0)
    ]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    told = pids.with_suffix(".new")
    told.write_text(" ".join(str(pid) for pid in (os.getpid(), *(one.pid for one in children))))
    told.rename(pids)
    time.sleep(3600)


def meet(folder: Path, own: Path, other: Path) -> None:
    """Ends when the other job has begun, too. A file in `folder` tells that it runs."""
    runs = folder / f"runs-{os.getpid()}"
    runs.touch()
    own.touch()
    wait_for(other)
    runs.unlink()


def alone(folder: Path) -> None:
    """Fails where another job runs that tells so in `folder`."""
    runs = folder / f"runs-{os.getpid()}"
    runs.touch()
    others = set(folder.glob("runs-*")) - {runs}
    runs.unlink()
    sys.exit(f"beside {others}" if others else 0)


def remove(folder: Path) -> None:
    """Removes the queue's folder once it tells of two jobs that run, and so is not written to."""
    while (folder / "queue.json").read_text().count('"running"') < 2:
        time.sleep(0.01)
    shutil.rmtree(folder)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def main() -> None:
    what, *files = sys.argv[1:]
    paths = [Path(file) for file in files]
    print(f"{what} with GPUs {os.environ['CUDA_VISIBLE_DEVICES']!r}")
    match what:
        case "write":
            paths[0].write_text("figures")
        case "hang":
            hang(paths[0])
        case "meet":
            meet(*paths)
        case "alone":
            alone(*paths)
        case "wait":
            wait_for(paths[0])
        case "remove":
            wait_for(paths[0])
            remove(paths[1])
        case "leave":
            left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            paths[0].write_text(str(left.pid))
        case _:
            sys.exit(3)


if __name__ == "__main__":
    main()

"""Becomes what a container runs, in a process that has just started.

1. ends with the tests; where the container has a resolv.conf of its own, sees it
2. takes the container's folder and environment
3. runs its command: here, where this is a fork that has imported it (`tests.forked_programs`),
   else by `exec`. Then this file is run by its path, and imports little
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

MODULE = "tests.kubernetes_stand_in.container_program"
GIVEN = "TANDEM_TESTS_CONTAINER"
"""The variable that has all of it, as JSON: `parent`, `resolv_conf`, `cwd`, `argv`, `env`."""
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS, _MS_BIND, _MS_REC_PRIVATE = 0x20000, 0x1000, 0x44000


def main() -> None:
    given = json.loads(os.environ[GIVEN])
    _become_container(given["parent"], given["resolv_conf"])
    os.chdir(given["cwd"])
    os.environ.clear()
    os.environ.update(given["env"])
    argv: list[str] = given["argv"]
    if (forks := sys.modules.get("tests.forked_programs")) is None:
        os.execvp(argv[0], argv)
    # `tandem` becomes a service that way.
    os.execv = lambda _, service: forks.run_instead(service)  # type: ignore[assignment]
    forks.run_instead(argv)


def _become_container(parent: int, resolv_conf: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        raise SystemExit("the tests have ended")
    if resolv_conf:
        check(libc.unshare(_CLONE_NEWNS))
        check(libc.mount(None, b"/", None, _MS_REC_PRIVATE, None))
        check(libc.mount(os.fsencode(resolv_conf), b"/etc/resolv.conf", None, _MS_BIND, None))


if __name__ == "__main__":
    main()

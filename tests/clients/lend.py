"""Lets a client's environment use the packages of ours, behind its own.

    python tests/clients/lend.py ENVIRONMENT/bin/python

For clients that need torch: a second one is 700 MB and minutes.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ASK = "import sysconfig; print(sysconfig.get_path('purelib'))"


def main() -> None:
    ours = sysconfig.get_path("purelib")
    theirs = subprocess.run([sys.argv[1], "-c", ASK], check=True, capture_output=True, text=True)
    line = f"import site; site.addsitedir({ours!r})\n"
    (Path(theirs.stdout.strip()) / "tandem.pth").write_text(line, encoding="utf-8")


if __name__ == "__main__":
    main()

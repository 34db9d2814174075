"""Kernel tests share one set of independent oracles: `import kernel_oracle`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

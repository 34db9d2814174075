"""KV transfer tests share harnesses: `import kv_loopback`, `import kv_nodes`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

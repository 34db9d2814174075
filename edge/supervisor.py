"""Reports to the parent of a service how far it is: one JSON object a line on standard output.

Where nothing can be written (a full disk, a closed pipe) the service runs all the same. What was
not written is tried again with the next line, and dropped at the end (`edge.program`).
"""

from __future__ import annotations

import json
import logging

logger = logging.getLogger(__name__)


def tell_supervisor(event: str, **facts: object) -> None:
    try:
        print(json.dumps({"event": event, **facts}), flush=True)
    except OSError as error:
        logger.warning("%r cannot be written to standard output: %s", event, error)

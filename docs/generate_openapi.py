#!/usr/bin/env python3
"""Writes `docs/openapi.json` from the types of the API. Run by `make docs`."""

from __future__ import annotations

import json
from pathlib import Path

from decode_node.http.openapi import openapi_document

if __name__ == "__main__":
    path = Path(__file__).with_name("openapi.json")
    path.write_text(json.dumps(openapi_document(), indent=1) + "\n")

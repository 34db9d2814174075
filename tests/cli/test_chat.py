"""`tandem chat` takes the address that `tandem up` prints."""

from __future__ import annotations

import pytest

from cli.chat import ChatSettings
from edge.command_line import parse_settings


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_the_address_may_end_with_the_version_of_the_api(end: str) -> None:
    args = ["--url", f"http://127.0.0.1:8791{end}"]
    assert parse_settings(ChatSettings, "tandem chat", args).url == "http://127.0.0.1:8791"

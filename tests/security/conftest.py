from __future__ import annotations

import pytest

from tests.security.authority import Authority


@pytest.fixture
def authority(tmp_path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def foreign(tmp_path) -> Authority:
    return Authority(tmp_path / "foreign")


@pytest.fixture
def token_file(tmp_path):
    """Writes secrets; the path."""

    def write(*secrets: str):
        path = tmp_path / "token"
        path.write_text("\n".join(secrets) + "\n")
        return path

    return write
